"""Selection of parameters for `make test`; `make test-all` tries every one."""

from collections.abc import Iterable
from typing import Any

import pytest


def sample(every: Iterable[Any], *kept: Any) -> list[Any]:
    """Mark all but the kept parameters nightly; raise ValueError for an unknown one."""
    values = list(every)
    if not kept or any(one not in values for one in kept):
        message = f"{kept} are not all among {values}"
        raise ValueError(message)
    return [one if one in kept else pytest.param(one, marks=pytest.mark.nightly) for one in values]
