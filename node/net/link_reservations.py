"""Interface between transfers and measured links: which to use, and how fast they were."""

from collections.abc import Sequence
from typing import Protocol

from fabric.ids import NodeName
from fabric.net.links import Address, nominal_bytes_per_s


class LinkBook(Protocol):
    """Book of the links to every peer; thread-safe, and never blocks."""

    def rank(self, peer: NodeName, addresses: Sequence[Address]) -> Sequence[tuple[Address, float]]:
        """Return addresses to use with the bytes per second to expect, fastest first.

        An address that is left out is not tried, so one that may work again must be included.
        """
        ...

    def observe(self, peer: NodeName, address: Address, moved_bytes: int, seconds: float) -> None:
        """Record the bytes that all streams to `address` moved while at least one was busy."""
        ...

    def failed(self, peer: NodeName, address: Address) -> None:
        """Record that `address` could not be reached, broke or stalled."""
        ...


class NominalLinks:
    """LinkBook that uses each address's nominal speed."""

    def rank(self, peer: NodeName, addresses: Sequence[Address]) -> Sequence[tuple[Address, float]]:
        """Sort by nominal speed; equal ones stay in order."""
        del peer
        distinct = dict.fromkeys(addresses)
        ranked = [(address, float(nominal_bytes_per_s(address))) for address in distinct]
        return sorted(ranked, key=lambda pair: -pair[1])

    def observe(self, peer: NodeName, address: Address, moved_bytes: int, seconds: float) -> None:
        """Ignore the observation."""

    def failed(self, peer: NodeName, address: Address) -> None:
        """Ignore the observation."""
