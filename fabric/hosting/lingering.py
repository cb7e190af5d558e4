"""Connections that stay open after an early answer, while the rest of the body is discarded.

Closing a connection while the client still sends resets it, and the client loses the answer. So
the close waits until the body has arrived, within limits: bytes and seconds of one connection,
number of connections, and bytes per second of all together.
"""

from collections.abc import Callable
from typing import Any, Protocol

from fabric.hosting.limits import (
    LINGER_BYTES_MAX,
    LINGER_BYTES_PER_S_MIN,
    LINGER_S,
    LINGERING_BYTES_PER_S_MAX,
    LINGERING_MAX,
)


class Closable(Protocol):
    """A connection that can be closed at once."""

    def drop(self) -> None:
        """Close at once."""
        ...


class Lingering:
    """All lingering connections of one server; a timer refills their budget of bytes."""

    def __init__(self) -> None:
        self._bytes: dict[Any, int] = {}  # discarded, the longest lingering first
        self._left_bytes = LINGERING_BYTES_PER_S_MAX

    def __contains__(self, connection: object) -> bool:
        return connection in self._bytes

    def add(self, connection: Closable) -> None:
        """Begin to discard; where too many linger, drop the one that has lingered longest."""
        self._bytes.setdefault(connection, 0)
        if len(self._bytes) > LINGERING_MAX:
            self._drop(next(iter(self._bytes)))

    def remove(self, connection: Closable) -> None:
        """End the discarding; an unknown connection is no error."""
        self._bytes.pop(connection, None)

    def discard(self, connection: Closable, size_bytes: int) -> bool:
        """Count bytes of a lingering connection; return whether it may read more at once."""
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
        """Return how many bytes of a lingering connection were discarded."""
        return self._bytes.get(connection, 0)

    def is_late(self, connection: Closable, waited_s: float) -> bool:
        """Return whether a connection has lingered longer than its bytes justify."""
        return waited_s > LINGER_S + self.discarded_bytes(connection) / LINGER_BYTES_PER_S_MIN

    def _drop(self, connection: Closable) -> None:
        self.remove(connection)
        connection.drop()


class PatientTransport:
    """Transport of one request's cycle, whose `close` lets the client read the answer."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def close_if_body_unsent(cycle: Any, app: Any) -> Any:
    """Wrap an application: close the connection of a client that was refused before it sent a body.

    A client that expects 100 Continue may omit the body once it reads another status, so the next
    bytes of its connection could be the body or another request.
    """

    async def answering(scope: Any, receive: Any, send: Any) -> None:
        async def send_or_close(message: Any) -> None:
            if message["type"] == "http.response.start" and cycle.waiting_for_100_continue:
                cycle.keep_alive = False
            await send(message)

        await app(scope, receive, send_or_close)

    return answering
