"""What the data plane asks and tells about links: which to use, how fast, how they went."""

from collections.abc import Sequence
from typing import Protocol

from fabric.ids import NodeName
from fabric.net.links import Address, nominal_bytes_per_s


class LinkBook(Protocol):
    """Knows the links to every peer; its methods are called from many threads and never block."""

    def rank(self, peer: NodeName, addresses: Sequence[Address]) -> Sequence[tuple[Address, float]]:
        """Return addresses to use with the bytes per second to expect, fastest first.

        An address that is left out is not tried; one that may work again must be in.
        """
        ...

    def observe(self, peer: NodeName, address: Address, moved_bytes: int, seconds: float) -> None:
        """Note what all streams to `address` moved together while at least one was at work."""
        ...

    def failed(self, peer: NodeName, address: Address) -> None:
        """Note that `address` could not be reached, broke or fell silent."""
        ...


class NominalLinks:
    """A LinkBook that believes what each address says of itself, and learns nothing."""

    def rank(self, peer: NodeName, addresses: Sequence[Address]) -> Sequence[tuple[Address, float]]:
        """Sort by nominal speed; of equals the one named first."""
        del peer
        distinct = dict.fromkeys(addresses)
        ranked = [(address, float(nominal_bytes_per_s(address))) for address in distinct]
        return sorted(ranked, key=lambda pair: -pair[1])

    def observe(self, peer: NodeName, address: Address, moved_bytes: int, seconds: float) -> None:
        """Note nothing."""

    def failed(self, peer: NodeName, address: Address) -> None:
        """Note nothing."""
