"""TLS in front of a guarded HTTP connection: a place in its table, and a time limit, from byte 0.

A server that is given a TLS context knows nothing of a connection until its handshake is over,
and asyncio lets that take a minute. Nothing here opens a socket: asyncio's own class, which is
passed in, does the handshake.
"""

from collections.abc import Callable
from typing import Any

from fabric.connection_limits import RECEIVE_BYTES_MAX
from fabric.http_guard.connection_table import ConnectionTable
from fabric.http_guard.guarded_connection import add_stranger, refusal
from fabric.limits import HANDSHAKE_TIMEOUT_S

HANDSHAKE = 0x16  # the first byte of whoever speaks TLS
HTTPS_REQUIRED = "https_required"
_CLEAR_TEXT = refusal(400, HTTPS_REQUIRED, "this port speaks https: begin its address with that")

_Base: Any = object  # asyncio's SSLProtocol, which fabric does not import


class Gate(_Base):  # type: ignore[misc]
    """One connection's TLS; a stranger in the table until the HTTP behind it takes its place."""

    table: ConnectionTable
    max_size = RECEIVE_BYTES_MAX  # of the buffer that every connection has

    def __init__(self, loop: Any, behind: Any, context: Any) -> None:
        super().__init__(
            loop,
            behind,
            context,
            waiter=None,
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            ssl_shutdown_timeout=HANDSHAKE_TIMEOUT_S,  # a peer that stands still holds up no stop
        )
        self.source = ""
        self.opened_s = 0.0
        self.head_bytes = 0
        self.is_idle = True
        self._raw: Any = None
        self._buffer: Any = None
        self._is_begun = False  # with the first byte of a handshake
        self._made_behind = behind.connection_made
        behind.connection_made = self._shaken

    def connection_made(self, transport: Any) -> None:
        """Take a place among strangers, and begin the handshake."""
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if peer else ""
        self._raw = transport
        add_stranger(self.table, self, self._loop)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave it."""
        self.table.remove(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> Any:
        """Return where the next bytes go."""
        self._buffer = super().get_buffer(sizehint)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes; tell whoever begins with a request in clear text what is spoken here."""
        if self in self.table.lingering:
            if not self.table.lingering.discard(self, nbytes):
                self._raw.pause_reading()
        elif self._is_begun or self._buffer[0] == HANDSHAKE:
            self._is_begun = True
            super().buffer_updated(nbytes)
        elif not self._raw.is_closing():
            self._raw.write(_CLEAR_TEXT)
            self._raw.write_eof()  # closing now could take the answer away again
            self.table.lingering.add(self)

    def eof_received(self) -> Any:
        """Close a connection that spoke clear text; leave others to TLS."""
        return None if self in self.table.lingering else super().eof_received()

    def drop(self) -> None:
        """Close at once."""
        self.table.remove(self)
        self._raw.abort()

    def check(self, now_s: float, *, is_stranger: bool) -> None:
        """Read on where bytes are discarded; the handshake's own timer ends it."""
        if self in self.table.lingering:
            self._raw.resume_reading()

    def _shaken(self, transport: Any) -> None:
        self.table.remove(self)
        self._made_behind(transport)


def over_tls(
    base: type[Any], behind: Callable[..., Any], table: ConnectionTable, context: Any
) -> Callable[..., Any]:
    """Return what makes a server's protocols: `behind` over TLS by asyncio's `base`."""
    gate = type("Gated", (Gate, base), {"table": table})

    def make(**uvicorns: Any) -> Any:
        inner = behind(**uvicorns)
        return gate(inner.loop, inner, context)

    return make
