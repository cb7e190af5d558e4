"""TLS handshakes of a guarded HTTP server, registered and timed from the first byte.

A server with a TLS context gets a connection only after its handshake, and asyncio allows that a
minute.
"""

import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

from fabric.errors import HTTPS_REQUIRED
from fabric.hosting.connection_table import ConnectionTable
from fabric.hosting.guarded_connection import refusal, register
from fabric.hosting.limits import RECEIVE_BYTES_MAX
from fabric.limits import HANDSHAKE_TIMEOUT_S

HANDSHAKE = 0x16  # the first byte that a TLS client sends
_CLEAR_TEXT = refusal(400, HTTPS_REQUIRED, "this port speaks https: begin its address with that")


class TlsGate(SSLProtocol):
    """TLS of one connection, registered until its HTTP connection is, after the handshake."""

    max_size = RECEIVE_BYTES_MAX  # of the buffer that every connection has

    def __init__(self, loop: Any, http: Any, table: ConnectionTable, context: Any) -> None:
        super().__init__(
            loop,
            http,
            context,
            waiter=None,  # type: ignore[arg-type]  # typeshed lacks the default
            server_side=True,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,  # type: ignore[arg-type]  # nor floats
            ssl_shutdown_timeout=HANDSHAKE_TIMEOUT_S,  # an unresponsive peer must not delay a stop
        )
        self.table = table
        self.source = ""
        self.opened_s = 0.0
        self.head_bytes = 0
        self.is_idle = True
        self._raw: Any = None
        self._buffer: Any = None
        self._is_begun = False  # with the first byte of a handshake
        self._on_handshake = http.connection_made
        http.connection_made = self._finish_handshake

    def connection_made(self, transport: Any) -> None:
        """Register as unauthenticated, and begin the handshake."""
        peer = transport.get_extra_info("peername")
        self.source = str(peer[0]) if peer else ""
        self._raw = transport
        register(self.table, self, self._loop)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Leave the table."""
        self.table.remove(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> Any:
        """Return the buffer for the next bytes."""
        self._buffer = super().get_buffer(sizehint)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle received bytes; answer clear text with an error that names https."""
        if self in self.table.lingering:
            if not self.table.lingering.discard(self, nbytes):
                self._raw.pause_reading()
        elif self._is_begun or self._buffer[0] == HANDSHAKE:
            self._is_begun = True
            super().buffer_updated(nbytes)
        elif not self._raw.is_closing():
            self._raw.write(_CLEAR_TEXT)
            self._raw.write_eof()  # closing now could discard the answer
            self.table.lingering.add(self)

    def eof_received(self) -> Any:
        """Close a connection that spoke clear text; leave others to TLS."""
        return None if self in self.table.lingering else super().eof_received()

    def drop(self) -> None:
        """Close at once."""
        self.table.remove(self)
        self._raw.abort()

    def check(self, now_s: float, *, is_unauthenticated: bool) -> None:
        """Resume reading where bytes are discarded; a handshake has its own timer."""
        if self in self.table.lingering:
            self._raw.resume_reading()

    def _finish_handshake(self, transport: Any) -> None:
        self.table.remove(self)
        self._on_handshake(transport)


def over_tls(
    http_class: Callable[..., Any], table: ConnectionTable, context: ssl.SSLContext
) -> Callable[..., TlsGate]:
    """Return a factory of uvicorn protocols: HTTP connections over TLS."""

    def build(**options: Any) -> TlsGate:
        http = http_class(**options)
        return TlsGate(http.loop, http, table, context)

    return build
