"""Ways to treat a KV cache whose text a client has edited in the middle."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class EditMode(StrEnum):
    """Treatment of the memory after an edit."""

    FORGET = "forget"  # recompute it from the edit on: exact
    AMORTIZE = (
        "amortize"  # keep it at its new position: approximate, computed with the replaced text
    )
    ANYWHERE = "anywhere"  # amortize, and use caches of the tenant's other agents

    @property
    def keeps(self) -> bool:
        """Return whether edited caches may be used."""
        return self is not EditMode.FORGET


# Names in requests and settings.
EDIT_MODES: Final[Mapping[str, EditMode]] = MappingProxyType(
    {"exact": EditMode.FORGET, "amortize": EditMode.AMORTIZE, "anywhere": EditMode.ANYWHERE}
)
EXACT: Final = "exact"
# What to do with a prompt over the context: drop its oldest part, or refuse it.
TRUNCATES: Final = "auto"
DISABLED: Final = "disabled"
TRUNCATIONS: Final = (TRUNCATES, DISABLED)
# Modes of one directive, which edits one agent's messages: they affect no other agent.
DIRECTIVE_MODES: Final[Mapping[str, EditMode]] = MappingProxyType(
    {name: mode for name, mode in EDIT_MODES.items() if mode is not EditMode.ANYWHERE}
)
