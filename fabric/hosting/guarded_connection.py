"""uvicorn's HTTP protocol with bounds that hold before a client shows a key.

Bounded are bytes, headers, seconds and connections; `HttpToolsProtocol` bounds none of these.
"""

import json
import logging
from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fabric.hosting.connection_table import ROUND_S, ClientConnection, ConnectionTable
from fabric.hosting.limits import (
    FIRST_REQUEST_S,
    HEAD_BYTES_MAX,
    HEAD_S,
    HEADERS_MAX,
    PIPELINED_MAX,
    RECEIVE_BYTES_MAX,
    URL_BYTES_MAX,
    WRITE_STALL_S,
)
from fabric.hosting.lingering import PatientTransport, close_if_body_unsent

SWEEP_S = 1.0
_SCOPE = "macfabric.connection"
_LOG = logging.getLogger("macfabric.http")
_LOG.setLevel(logging.ERROR)  # clients' mistakes fill no log


def admit(scope: MutableMapping[str, Any], owner: str) -> None:
    """Admit the connection of `owner`'s request, where the server guards its connections."""
    connection = scope.get(_SCOPE)
    if connection is not None:
        connection.admit(owner)


def is_closing(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a request's connection is closing, which the server may not have noticed."""
    connection = scope.get(_SCOPE)
    return connection is not None and bool(connection.transport.is_closing())


class GuardedConnection(HttpToolsProtocol):
    """HTTP connection that bounds a request's head by bytes and seconds."""

    table: ConnectionTable

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.access_logger = _LOG
        self.access_log = False
        self.source = ""
        self.opened_s = 0.0
        self.head_bytes = 0
        self._refusal = (400, "invalid_http", "this is not a valid HTTP request")
        self._is_in_head = True
        self._keeps_count = True  # no event of the parser since the head's last bytes
        self._is_whole = True  # the last request's body has arrived
        self._is_ending = False
        self._is_last = False  # the server stops: no request follows
        self._closes_after_body = False
        self._discarded_bytes = -1  # at the last check
        self._running: Any = None  # the request being served; `cycle` is the last one parsed
        self._since_s = 0.0  # the connection's start, or its last progress
        self._headers_count = self._headers_bytes = 0
        self._unsent_bytes = 0
        self._unsent_since_s = 0.0

    # Connections

    def connection_made(self, transport: Any) -> None:
        """Register as unauthenticated."""
        transport.max_size = RECEIVE_BYTES_MAX  # a quarter of asyncio's own, at a time
        super().connection_made(transport)
        self.source = self.client[0] if self.client else ""
        self._since_s = self._unsent_since_s = self.loop.time()
        register(self.table, self, self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the table, and end the request being served."""
        self.table.remove(self)
        super().connection_lost(exc)  # which ends the last request only
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.transport = PatientTransport(self.transport, self._close_after_body)
        super()._start_asgi_task(
            cycle, close_if_body_unsent(cycle, app) if cycle.waiting_for_100_continue else app
        )

    def admit(self, owner: str) -> None:
        """Admit the connection for `owner`."""
        self.table.admit(self, owner)

    @property
    def is_idle(self) -> bool:
        """Return whether no request is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def shutdown(self) -> None:
        """Close after the request under way; a new connection gets a moment for its first one."""
        self._is_last = True
        if self.cycle is None:
            self.loop.call_later(FIRST_REQUEST_S, self._close_unused)
        else:
            super().shutdown()

    def _close_unused(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def drop(self) -> None:
        """Close at once."""
        self.table.remove(self)
        self.transport.abort()

    def check(self, now_s: float, *, is_unauthenticated: bool) -> None:
        """Close if the client sends its request or reads its answer too slowly."""
        waits_s = now_s - self._since_s
        if self in self.table.lingering:
            self._check_lingering(waits_s)
        elif self.is_idle:
            if self._is_in_head and waits_s > HEAD_S:
                self._refuse(408, "slow_headers", f"headers take longer than {HEAD_S:g} s")
            elif (self.cycle is None or is_unauthenticated) and waits_s > HEAD_S:
                self.drop()
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes or not unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent_bytes, now_s
        elif now_s - self._unsent_since_s > WRITE_STALL_S:
            self.drop()

    def _check_lingering(self, waits_s: float) -> None:
        lingering = self.table.lingering
        last_bytes, self._discarded_bytes = self._discarded_bytes, lingering.discarded_bytes(self)
        ends = self._is_ending or self._closes_after_body
        if lingering.is_late(self, waits_s):
            self.drop()
        elif ends and last_bytes == self._discarded_bytes and not self.transport.can_write_eof():
            self.transport.close()  # over TLS, only this signals the end to the client
        else:
            self.flow.resume_reading()

    # Bytes

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and count them until an event of the parser shows progress."""
        if self in self.table.lingering and not self.table.lingering.discard(self, len(data)):
            self.flow.pause_reading()
        if self._is_ending or self.transport.is_closing():
            return
        count = self.head_bytes + len(data)
        self._keeps_count = True
        super().data_received(data)
        if self._is_ending or self.transport.is_closing():
            self.table.hold(self, 0)
            return
        self.table.hold(self, count if self._keeps_count else 0)
        if self.head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Begin a request's head."""
        super().on_message_begin()
        self.scope[_SCOPE] = self  # type: ignore[literal-required]
        self._is_in_head = True
        self._headers_count = self._headers_bytes = 0
        if self.is_idle and self.cycle is not None:
            self._since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        """Append a part of the URL."""
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            self._stop(414, "url_too_long", f"a URL has at most {URL_BYTES_MAX} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; ignore trailers, which come after the request was authorized."""
        self._headers_count += 1
        self._headers_bytes += len(name) + len(value)
        if self._headers_count > HEADERS_MAX or self._headers_bytes > HEAD_BYTES_MAX:
            self._stop(431, "headers_too_large", _HEAD_TEXT)
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to serve the request, unless too many are queued before it."""
        self._is_in_head = self._keeps_count = False
        if len(self.pipeline) >= PIPELINED_MAX:
            self._stop(400, "too_many_pipelined", f"{PIPELINED_MAX} requests wait already")
        self._is_whole = False
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._keeps_count = False
        if not self._closes_after_body:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Mark the body as complete."""
        self._keeps_count = False
        self._is_whole = True
        self.table.lingering.remove(self)
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Discard the rest of a body that the application did not read."""
        self._since_s = self.loop.time()
        if self.is_idle and self.cycle is not None:
            self.cycle.body = bytearray()
            if not self._is_whole:
                self.table.lingering.add(self)
        super().on_response_complete()

    # Refusals

    def _close_after_body(self) -> None:
        """Close once the client has sent its body: closing sooner would lose the answer."""
        if self._is_whole or self._running is not self.cycle:
            self.transport.close()
            return
        self._closes_after_body, self._since_s = True, self.loop.time()
        self.table.lingering.add(self)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _stop(self, status: int, code: str, message: str) -> None:
        """Make the parser fail, which sends the refusal."""
        self._refusal = (status, code, message)
        raise ValueError(code)

    def _refuse_head(self) -> None:
        self._refuse(431, "headers_too_large", _HEAD_TEXT)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refusal = (status, code, message)
        self.send_400_response(message)

    def send_400_response(self, msg: str) -> None:
        """Answer in the API's own shape, and close once the client has read it."""
        del msg  # the refusal has a better one
        self._is_ending, self._since_s = True, self.loop.time()
        self.table.hold(self, 0)
        if not self.is_idle:
            if self.pipeline or self.cycle.response_started:  # this would read as a part of it
                self.transport.close()
                return
            self.cycle.disconnected = True  # the application need not answer
            self.cycle.waiting_for_100_continue = False  # nor request the body
            self.cycle.message_event.set()
        self.transport.write(refusal(*self._refusal))
        self.table.lingering.add(self)  # closing now could discard the answer
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _unsupported_upgrade_warning(self) -> None:
        pass


def connections_in(table: ConnectionTable) -> type[GuardedConnection]:
    """Return the protocol class whose connections are registered in `table`."""
    return type("Guarded", (GuardedConnection,), {"table": table})


_HEAD_TEXT = f"a request has at most {HEADERS_MAX} headers of {HEAD_BYTES_MAX} bytes together"
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
}


def refusal(status: int, code: str, message: str) -> bytes:
    """Return a whole response, in the API's shape, that closes its connection."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def register(table: ConnectionTable, connection: ClientConnection, loop: Any) -> None:
    """Add a new connection to the table, and start the table's timers where needed."""
    table.add(connection)
    if table.sweeping is None:
        table.sweeping = loop.call_later(SWEEP_S, _sweep, table, loop)
    if table.trimming is None and table.is_crowded:
        table.trimming = loop.call_later(ROUND_S, _trim, table, loop)


def _trim(table: ConnectionTable, loop: Any) -> None:
    table.trim()
    table.trimming = loop.call_later(ROUND_S, _trim, table, loop) if table.is_crowded else None


def _sweep(table: ConnectionTable, loop: Any) -> None:
    now_s = loop.time()
    table.lingering.refill()
    for connection in table:
        connection.check(now_s, is_unauthenticated=table.is_unauthenticated(connection))
    table.sweeping = loop.call_later(SWEEP_S, _sweep, table, loop) if len(table) else None
