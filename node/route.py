"""Which of a peer's addresses to try next: the order given, until one fails.

An address that failed is tried again only after every other one has failed as often. One that
turned out to be no peer of ours (another node's, another key, another version) never is.
"""

from collections.abc import Sequence
from threading import Lock

from fabric.control import Address
from fabric.errors import FabricError, RetryLaterError


class Route:
    """The addresses of one peer for one transfer; shared by its streams."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._lock = Lock()
        self._failures = dict.fromkeys(addresses, 0)
        self.size = len(self._failures)
        self._refusal: FabricError | None = None

    def pick(self) -> tuple[Address, bool]:
        """Return the best address, and whether it has failed before (so: pause first)."""
        with self._lock:
            if not self._failures:
                raise self._refusal or RetryLaterError("the peer has no address")
            best = min(self._failures, key=lambda address: self._failures[address])
            return best, self._failures[best] > 0

    def failed(self, address: Address) -> None:
        """Prefer others to `address` from now on."""
        with self._lock:
            if address in self._failures:
                self._failures[address] += 1

    def exclude(self, address: Address, refusal: FabricError) -> None:
        """Never use `address` again; `refusal` is raised once none is left."""
        with self._lock:
            if self._refusal is None:
                self._refusal = refusal
            self._failures.pop(address, None)
