"""What becomes of a memory whose text was edited in the middle, as the client wishes it."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class EditMode(StrEnum):
    """Treatment of the memory after an edit."""

    FORGET = "forget"  # not at all: it is computed again, as if the text had always been this one
    AMORTIZE = "amortize"  # as it is, at its new place: it still reflects what was there before
    ANYWHERE = "anywhere"  # so, and what other agents of the tenant have of it is taken, too

    @property
    def keeps(self) -> bool:
        """Say whether memory that was edited may serve."""
        return self is not EditMode.FORGET


# As clients and operators call them.
EDIT_MODES: Final[Mapping[str, EditMode]] = MappingProxyType(
    {"exact": EditMode.FORGET, "amortize": EditMode.AMORTIZE, "anywhere": EditMode.ANYWHERE}
)
EXACT: Final = "exact"
# Of one message that is edited: whose memory else serves is no question of it.
DIRECTIVE_MODES: Final[Mapping[str, EditMode]] = MappingProxyType(
    {name: mode for name, mode in EDIT_MODES.items() if mode is not EditMode.ANYWHERE}
)
