"""Modes for a KV cache whose text was edited in the middle, as chosen by the client."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class EditMode(StrEnum):
    """Treatment of the memory after an edit."""

    FORGET = "forget"  # not at all: it is computed again, as if the text had always been this one
    AMORTIZE = "amortize"  # kept at its new position: it still reflects the replaced text
    ANYWHERE = "anywhere"  # likewise, and caches of the tenant's other agents are used, too

    @property
    def keeps(self) -> bool:
        """Return whether edited caches may be used."""
        return self is not EditMode.FORGET


# As clients and operators call them.
EDIT_MODES: Final[Mapping[str, EditMode]] = MappingProxyType(
    {"exact": EditMode.FORGET, "amortize": EditMode.AMORTIZE, "anywhere": EditMode.ANYWHERE}
)
EXACT: Final = "exact"
# Of a prompt over the context: the oldest of it is dropped, or it is refused.
TRUNCATES: Final = "auto"
DISABLED: Final = "disabled"
TRUNCATIONS: Final = (TRUNCATES, DISABLED)
# Of one message that is edited: whose memory else serves is no question of it.
DIRECTIVE_MODES: Final[Mapping[str, EditMode]] = MappingProxyType(
    {name: mode for name, mode in EDIT_MODES.items() if mode is not EditMode.ANYWHERE}
)
