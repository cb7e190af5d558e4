"""Encryption of the data plane's links: all but cables between two Macs."""

from typing import Protocol

from fabric.settings import ALWAYS, NEVER


class Line(Protocol):
    """A connection that can tell its kind of link."""

    def is_on_cable(self) -> bool:
        """Return whether everything it sends leaves by a Thunderbolt cable."""
        ...


def must_encrypt(mode: str, line: Line) -> bool:
    """Return whether this end requires encryption; `mode` is `node.encrypt_links`.

    Each end checks its own interface; a connection is encrypted if either requires it.
    """
    return mode == ALWAYS or (mode != NEVER and not line.is_on_cable())
