"""Connections that stay open after an early answer, while the rest of the body is discarded.

A server that closes a connection while the client still sends resets it, and the client loses the
answer. So the close waits until the body has arrived, within limits: bytes and seconds of each
connection, connections at once, and bytes per second of all of them together.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

from fabric.connection_limits import LINGER_S
from fabric.limits import MIB

LINGER_BYTES_PER_S_MIN: Final = 1 * MIB  # discarded of one connection: a second more for each
LINGER_BYTES_MAX: Final = 128 * MIB  # discarded of one connection
LINGERING_MAX: Final = 256  # connections whose bytes are discarded at once
LINGERING_BYTES_PER_S_MAX: Final = 256 * MIB  # of all of them; then they wait for the next second


class Closable(Protocol):
    """A connection that can be closed at once."""

    def drop(self) -> None:
        """Close at once."""
        ...


class Lingering:
    """All connections of one server whose bytes are discarded; a timer refills their budget."""

    def __init__(self) -> None:
        self._bytes: dict[Any, int] = {}  # discarded of each, the longest lingering first
        self._left_bytes = LINGERING_BYTES_PER_S_MAX

    def __contains__(self, connection: object) -> bool:
        return connection in self._bytes

    def add(self, connection: Closable) -> None:
        """Begin to discard; drop the connection that has lingered longest where there are many."""
        self._bytes.setdefault(connection, 0)
        if len(self._bytes) > LINGERING_MAX:
            self._drop(next(iter(self._bytes)))

    def remove(self, connection: Closable) -> None:
        """End the discarding; unknown connections are no error."""
        self._bytes.pop(connection, None)

    def discard(self, connection: Closable, size_bytes: int) -> bool:
        """Count bytes of a lingering connection; return whether it may read on at once."""
        self._bytes[connection] += size_bytes
        if self._bytes[connection] > LINGER_BYTES_MAX:
            self._drop(connection)
            return False
        self._left_bytes -= size_bytes
        return self._left_bytes > 0

    def refill(self) -> None:
        """Allow the bytes of the next second."""
        self._left_bytes = LINGERING_BYTES_PER_S_MAX

    def discarded_bytes(self, connection: Closable) -> int:
        """Return how much was discarded of a connection that lingers."""
        return self._bytes.get(connection, 0)

    def is_late(self, connection: Closable, waited_s: float) -> bool:
        """Return whether a connection has lingered longer than its bytes justify."""
        return waited_s > LINGER_S + self.discarded_bytes(connection) / LINGER_BYTES_PER_S_MIN

    def _drop(self, connection: Closable) -> None:
        self.remove(connection)
        connection.drop()


class PatientTransport:
    """A transport as one request's cycle sees it, whose `close` lets the client read the answer."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def closing_unless_asked(cycle: Any, app: Any) -> Any:
    """Wrap an application: end the connection of a client that was refused before it sent.

    A client that expects 100 Continue may leave the body out once it reads another status, so the
    next bytes of its connection could be the body or another request.
    """

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        async def send_or_close(message: Any) -> None:
            if message["type"] == "http.response.start" and cycle.waiting_for_100_continue:
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, send_or_close)

    return answering
