"""Which links of the data plane are encrypted: all but cables that join two Macs alone."""

from typing import Protocol

from fabric.settings import ALWAYS, NEVER


class Line(Protocol):
    """A connection that knows what it runs over."""

    def is_on_cable(self) -> bool:
        """Say whether all it sends leaves by a Thunderbolt cable."""
        ...


def must_encrypt(mode: str, line: Line) -> bool:
    """Say whether this end wants a connection encrypted; `mode` is `node.encrypt_links`.

    Each end looks at its own interface, and what either wants is done.
    """
    return mode == ALWAYS or (mode != NEVER and not line.is_on_cable())
