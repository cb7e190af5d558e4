"""Whose connections a server keeps when places run out.

stranger   no request of it was let in yet: the oldest of the busiest source makes room,
               after its first moment
admitted   one was: it stays, unless it is idle when places run out

That moment is counted in rounds of the server's event loop, because a loop that is late has not
read yet what a stranger sent in time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.connection_limits import (
    CONNECTIONS_MAX,
    HEADS_BYTES_MAX,
    STRANGER_S,
    STRANGERS_MAX,
    STRANGERS_PER_SOURCE_MAX,
)
from fabric.http_guard.lingering import Lingering

YOUNG_FACTOR = 2  # so many times the places of strangers, while they are young
ROUND_S = 0.05  # between two looks at strangers while there are too many


@dataclass(frozen=True, slots=True)
class Places:
    """Limits on the connections of a server."""

    strangers: int = STRANGERS_MAX
    strangers_per_source: int = STRANGERS_PER_SOURCE_MAX
    admitted: int = CONNECTIONS_MAX


class ClientConnection(Protocol):
    """A connection as the table sees it."""

    source: str
    opened_s: float  # by the table's `waited_s`
    head_bytes: int  # of a request that is not complete yet

    @property
    def is_idle(self) -> bool:
        """Say whether no request is under way."""
        ...

    def drop(self) -> None:
        """Close at once."""
        ...


class ConnectionTable:
    """All connections of one server, and who makes room when places run out."""

    def __init__(self, places: Places | None = None) -> None:
        self._places = places or Places()
        self._strangers: dict[str, dict[Any, None]] = {}  # by source, oldest first
        self._strangers_count = 0
        self._admitted: dict[str, dict[Any, None]] = {}  # by owner, least recently used first
        self._owners: dict[Any, str] = {}
        self._heads_bytes = 0
        self.sweeping: Any = None  # the timer, while there is a connection
        self.trimming: Any = None  # the timer, while there are too many strangers
        self.waited_s = 0.0  # for strangers, in rounds of the event loop
        self.lingering = Lingering()

    def __iter__(self) -> Iterator[Any]:
        """Go through all connections, however many leave meanwhile."""
        listed = [c for group in self._strangers.values() for c in group]
        return iter([*listed, *self._owners])

    def __len__(self) -> int:
        return self._strangers_count + len(self._owners)

    @property
    def is_crowded(self) -> bool:
        """Say whether there are more strangers than places for them."""
        return (
            self._strangers_count > self._places.strangers
            or len(self._busiest()) > self._places.strangers_per_source
        )

    def add(self, connection: ClientConnection) -> None:
        """Take in a stranger; drop the oldest of the busiest source at twice the places."""
        connection.opened_s = self.waited_s
        self._strangers.setdefault(connection.source, {})[connection] = None
        self._strangers_count += 1
        if self._strangers_count > YOUNG_FACTOR * self._places.strangers:
            self._oldest().drop()

    def trim(self) -> None:
        """Count a round, and drop strangers that had their time while there are too many."""
        self.waited_s += ROUND_S
        while self.is_crowded:
            oldest = self._oldest()
            if self.waited_s - oldest.opened_s < STRANGER_S:
                return
            oldest.drop()

    def _busiest(self) -> dict[Any, None]:
        return max(self._strangers.values(), key=len, default={})

    def _oldest(self) -> Any:
        return next(iter(self._busiest()))

    def admit(self, connection: ClientConnection, owner: str) -> None:
        """Note that a request of `owner` was let in on this connection."""
        if connection in self._owners:
            del self._admitted[self._owners[connection]][connection]
        elif not self._forget_stranger(connection):
            return  # it is gone already
        self._owners[connection] = owner
        self._admitted.setdefault(owner, {})[connection] = None
        if len(self._owners) > self._places.admitted:
            self._make_room(connection)

    def is_stranger(self, connection: ClientConnection) -> bool:
        """Say whether no request of it was let in yet."""
        return connection not in self._owners

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection; unknown ones are no error."""
        self.lingering.remove(connection)
        self.hold(connection, 0)
        owner = self._owners.pop(connection, None)
        if owner is None:
            self._forget_stranger(connection)
            return
        group = self._admitted[owner]
        del group[connection]
        if not group:
            del self._admitted[owner]

    def hold(self, connection: ClientConnection, head_bytes: int) -> None:
        """Count an incomplete head; where all are too large together, the largest is dropped."""
        self._heads_bytes += head_bytes - connection.head_bytes
        connection.head_bytes = head_bytes
        if head_bytes and self._heads_bytes > HEADS_BYTES_MAX:
            max(self, key=_head_bytes).drop()

    def _forget_stranger(self, connection: ClientConnection) -> bool:
        group = self._strangers.get(connection.source, {})
        if connection not in group:
            return False
        del group[connection]
        self._strangers_count -= 1
        if not group:
            del self._strangers[connection.source]
        return True

    def _make_room(self, newest: ClientConnection) -> None:
        """Drop the longest idle connection of whoever has most."""
        for group in sorted(self._admitted.values(), key=len, reverse=True):
            for each in group:
                if each.is_idle and each is not newest:
                    each.drop()
                    return


def _head_bytes(connection: ClientConnection) -> int:
    return connection.head_bytes
