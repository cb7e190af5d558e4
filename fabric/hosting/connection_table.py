"""All connections of a server, and which it evicts when slots run out.

unauthenticated   no request of it was authorized yet: the oldest of the busiest source is evicted,
                  after a short grace
admitted          a request was: it is evicted only when idle

The grace is counted in rounds of the server's event loop, because a loop that is late has not yet
read what an unauthenticated connection sent in time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.hosting.limits import (
    ADMITTED_MAX,
    HEADS_BYTES_MAX,
    UNAUTHENTICATED_MAX,
    UNAUTHENTICATED_PER_SOURCE_MAX,
    UNAUTHENTICATED_S,
)
from fabric.hosting.lingering import Lingering

BURST_FACTOR = 2  # times the slots of unauthenticated connections, during their grace
ROUND_S = 0.05  # between two evictions while there are too many unauthenticated connections


@dataclass(frozen=True, slots=True)
class ConnectionSlots:
    """Limits on the connections of a server."""

    unauthenticated: int = UNAUTHENTICATED_MAX
    unauthenticated_per_source: int = UNAUTHENTICATED_PER_SOURCE_MAX
    admitted: int = ADMITTED_MAX


class ClientConnection(Protocol):
    """A connection as the table sees it."""

    source: str
    opened_s: float  # by the table's `waited_s`
    head_bytes: int  # of an incomplete request

    @property
    def is_idle(self) -> bool:
        """Return whether no request is under way."""
        ...

    def drop(self) -> None:
        """Close at once."""
        ...


class ConnectionTable:
    """All connections of one server, which evicts some when slots run out."""

    def __init__(self, slots: ConnectionSlots | None = None) -> None:
        self._slots = slots or ConnectionSlots()
        self._unauthenticated: dict[str, dict[Any, None]] = {}  # by source, oldest first
        self._unauthenticated_count = 0
        self._admitted: dict[str, dict[Any, None]] = {}  # by owner, least recently used first
        self._owners: dict[Any, str] = {}
        self._heads_bytes = 0
        self.sweeping: Any = None  # the timer, while there is a connection
        self.trimming: Any = None  # the timer, while there are too many unauthenticated ones
        self.waited_s = 0.0  # in rounds of the event loop
        self.lingering = Lingering()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over a copy, so that connections may close during the iteration."""
        unauthenticated = [c for group in self._unauthenticated.values() for c in group]
        return iter([*unauthenticated, *self._owners])

    def __len__(self) -> int:
        return self._unauthenticated_count + len(self._owners)

    @property
    def is_crowded(self) -> bool:
        """Return whether there are more unauthenticated connections than slots for them."""
        return (
            self._unauthenticated_count > self._slots.unauthenticated
            or len(self._busiest()) > self._slots.unauthenticated_per_source
        )

    def add(self, connection: ClientConnection) -> None:
        """Add an unauthenticated connection; at twice the slots, evict the oldest."""
        connection.opened_s = self.waited_s
        self._unauthenticated.setdefault(connection.source, {})[connection] = None
        self._unauthenticated_count += 1
        if self._unauthenticated_count > BURST_FACTOR * self._slots.unauthenticated:
            self._oldest().drop()

    def trim(self) -> None:
        """Count a round, and evict unauthenticated connections past their grace while too many."""
        self.waited_s += ROUND_S
        while self.is_crowded:
            oldest = self._oldest()
            if self.waited_s - oldest.opened_s < UNAUTHENTICATED_S:
                return
            oldest.drop()

    def _busiest(self) -> dict[Any, None]:
        return max(self._unauthenticated.values(), key=len, default={})

    def _oldest(self) -> Any:
        return next(iter(self._busiest()))

    def admit(self, connection: ClientConnection, owner: str) -> None:
        """Admit a connection: a request of `owner` on it was authorized."""
        if connection in self._owners:
            del self._admitted[self._owners[connection]][connection]
        elif not self._remove_unauthenticated(connection):
            return  # it is closed already
        self._owners[connection] = owner
        self._admitted.setdefault(owner, {})[connection] = None
        if len(self._owners) > self._slots.admitted:
            self._evict_idle(connection)

    def is_unauthenticated(self, connection: ClientConnection) -> bool:
        """Return whether no request of a connection was authorized yet."""
        return connection not in self._owners

    def remove(self, connection: ClientConnection) -> None:
        """Remove a connection; an unknown one is no error."""
        self.lingering.remove(connection)
        self.hold(connection, 0)
        owner = self._owners.pop(connection, None)
        if owner is None:
            self._remove_unauthenticated(connection)
            return
        group = self._admitted[owner]
        del group[connection]
        if not group:
            del self._admitted[owner]

    def hold(self, connection: ClientConnection, head_bytes: int) -> None:
        """Count an incomplete head; where all together are too large, drop the largest."""
        self._heads_bytes += head_bytes - connection.head_bytes
        connection.head_bytes = head_bytes
        if head_bytes and self._heads_bytes > HEADS_BYTES_MAX:
            max(self, key=_head_bytes).drop()

    def _remove_unauthenticated(self, connection: ClientConnection) -> bool:
        group = self._unauthenticated.get(connection.source, {})
        if connection not in group:
            return False
        del group[connection]
        self._unauthenticated_count -= 1
        if not group:
            del self._unauthenticated[connection.source]
        return True

    def _evict_idle(self, newest: ClientConnection) -> None:
        """Drop the longest idle connection of the owner with the most connections."""
        for group in sorted(self._admitted.values(), key=len, reverse=True):
            for connection in group:
                if connection.is_idle and connection is not newest:
                    connection.drop()
                    return


def _head_bytes(connection: ClientConnection) -> int:
    return connection.head_bytes
