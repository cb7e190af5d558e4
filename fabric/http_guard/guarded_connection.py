"""Bounds on HTTP connections before anybody has shown a key: bytes, headers, seconds, places.

uvicorn's protocol for httptools bounds none of these; `guarded` returns it with bounds. Nothing
here opens a socket or reads a clock: uvicorn's classes, which are passed in, do.
"""

import json
import logging
from collections.abc import MutableMapping
from typing import Any

from fabric.connection_limits import (
    HEAD_BYTES_MAX,
    HEAD_S,
    HEADERS_MAX,
    PIPELINED_MAX,
    RECEIVE_BYTES_MAX,
    URL_BYTES_MAX,
    WRITE_STALL_S,
)
from fabric.http_guard.connection_table import ROUND_S, ClientConnection, ConnectionTable
from fabric.http_guard.lingering import PatientTransport, closing_unless_asked

SWEEP_S = 1.0
_SCOPE = "macfabric.connection"
_LOG = logging.getLogger("macfabric.http")
_LOG.setLevel(logging.ERROR)  # strangers' mistakes fill no log


def admit(scope: MutableMapping[str, Any], owner: str) -> None:
    """Let the request's connection stay for `owner`, where the server is a guarded one."""
    connection = scope.get(_SCOPE)
    if connection is not None:
        connection.admit(owner)


def is_closing(scope: MutableMapping[str, Any]) -> bool:
    """Say whether nothing that is sent arrives any more, before the server has noticed."""
    connection = scope.get(_SCOPE)
    return connection is not None and bool(connection.transport.is_closing())


_Base: Any = object  # uvicorn's protocol, which fabric does not import


class Guard(_Base):  # type: ignore[misc]
    """Counts what arrives until a request's head is complete, and how long that takes."""

    table: ConnectionTable

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = self.access_logger = _LOG
        self.access_log = False
        self.source = ""
        self.opened_s = 0.0
        self.head_bytes = 0
        self._refusal = (400, "invalid_http", "this is no valid HTTP request")
        self._is_in_head = True
        self._counts_on = True  # no event of the parser since the head's last bytes
        self._is_whole = True  # the last request's body has arrived
        self._is_ending = False
        self._closes_after_body = False
        self._discarded_bytes = -1  # at the last check
        self._running: Any = None  # the request being served; `cycle` is the last one parsed
        self._since_s = 0.0  # the connection's begin, or its last progress
        self._headers_count = self._headers_bytes = 0
        self._unsent_bytes = 0
        self._unsent_since_s = 0.0

    # Connections

    def connection_made(self, transport: Any) -> None:
        """Take a place among strangers."""
        transport.max_size = RECEIVE_BYTES_MAX  # a quarter of asyncio's own, at a time
        super().connection_made(transport)
        self.source = self.client[0] if self.client else ""
        self._since_s = self._unsent_since_s = self.loop.time()
        add_stranger(self.table, self, self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave it."""
        self.table.remove(self)
        super().connection_lost(exc)  # which tells the last request only
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.transport = PatientTransport(self.transport, self._close_after_body)
        super()._start_asgi_task(
            cycle, closing_unless_asked(cycle, app) if cycle.waiting_for_100_continue else app
        )

    def admit(self, owner: str) -> None:
        """Stay for `owner`."""
        self.table.admit(self, owner)

    @property
    def is_idle(self) -> bool:
        """Say whether no request is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def drop(self) -> None:
        """Close at once."""
        self.table.remove(self)
        self.transport.abort()

    def check(self, now_s: float, *, is_stranger: bool) -> None:
        """Close what has taken too long."""
        waits_s = now_s - self._since_s
        if self in self.table.lingering:
            self._check_lingering(waits_s)
        elif self.is_idle:
            if self._is_in_head and waits_s > HEAD_S:
                self._refuse(408, "slow_headers", f"headers take longer than {HEAD_S:g} s")
            elif (self.cycle is None or is_stranger) and waits_s > HEAD_S:
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
            self.transport.close()  # over TLS, nothing else tells the client that this is the end
        else:
            self.flow.resume_reading()

    # Bytes

    def data_received(self, data: bytes) -> None:
        """Parse what came, and count it until an event of the parser says that it was of use."""
        if self in self.table.lingering and not self.table.lingering.discard(self, len(data)):
            self.flow.pause_reading()
        if self._is_ending or self.transport.is_closing():
            return
        count = self.head_bytes + len(data)
        self._counts_on = True
        super().data_received(data)
        if self._is_ending or self.transport.is_closing():
            self.table.hold(self, 0)
            return
        self.table.hold(self, count if self._counts_on else 0)
        if self.head_bytes > HEAD_BYTES_MAX:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """Begin a request's head."""
        super().on_message_begin()
        self.scope[_SCOPE] = self
        self._is_in_head = True
        self._headers_count = self._headers_bytes = 0
        if self.is_idle and self.cycle is not None:
            self._since_s = self.loop.time()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            self._stop(414, "url_too_long", f"a URL has at most {URL_BYTES_MAX} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what follows a body comes too late to be believed."""
        self._headers_count += 1
        self._headers_bytes += len(name) + len(value)
        if self._headers_count > HEADERS_MAX or self._headers_bytes > HEAD_BYTES_MAX:
            self._stop(431, "headers_too_large", _HEAD_TEXT)
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to serve the request, unless too many wait before it."""
        self._is_in_head = self._counts_on = False
        if len(self.pipeline) >= PIPELINED_MAX:
            self._stop(400, "too_many_pipelined", f"{PIPELINED_MAX} requests wait already")
        self._is_whole = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._counts_on = False
        if not self._closes_after_body:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the body is whole."""
        self._counts_on = False
        self._is_whole = True
        self.table.lingering.remove(self)
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Drop what nobody reads any more."""
        self._since_s = self.loop.time()
        if self.is_idle and self.cycle is not None:
            self.cycle.body = bytearray()
            if not self._is_whole:
                self.table.lingering.add(self)
        super().on_response_complete()

    # Refusals

    def _close_after_body(self) -> None:
        """Close once the client has sent what it is sending: sooner, it would lose the answer."""
        if self._is_whole or self._running is not self.cycle:
            self.transport.close()
            return
        self._closes_after_body, self._since_s = True, self.loop.time()
        self.table.lingering.add(self)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _stop(self, status: int, code: str, message: str) -> None:
        """End the parsing of what is being parsed."""
        self._refusal = (status, code, message)
        raise ValueError(code)

    def _refuse_head(self) -> None:
        self._refuse(431, "headers_too_large", _HEAD_TEXT)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._refusal = (status, code, message)
        self.send_400_response(message)

    def send_400_response(self, msg: str) -> None:
        """Answer in the API's own shape, and close when that is read."""
        del msg  # ours says what is wrong
        self._is_ending, self._since_s = True, self.loop.time()
        self.table.hold(self, 0)
        if not self.is_idle:
            if self.pipeline or self.cycle.response_started:  # this would be taken for its part
                self.transport.close()
                return
            self.cycle.disconnected = True  # whoever works on it need not answer
            self.cycle.waiting_for_100_continue = False  # nor ask for more
            self.cycle.message_event.set()
        self.transport.write(refusal(*self._refusal))
        self.table.lingering.add(self)  # closing now could take the answer away again
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _unsupported_upgrade_warning(self) -> None:
        pass


def guarded(base: type[Any], table: ConnectionTable) -> type[Any]:
    """Return uvicorn's `HttpToolsProtocol` with every connection in `table` and in bounds."""
    return type("Guarded", (Guard, base), {"table": table})


_HEAD_TEXT = f"a request has at most {HEADERS_MAX} headers of {HEAD_BYTES_MAX} bytes together"
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
}


def refusal(status: int, code: str, message: str) -> bytes:
    """Return a whole answer, in the API's shape, that ends its connection."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def add_stranger(table: ConnectionTable, connection: ClientConnection, loop: Any) -> None:
    """Give a new connection its place, and see that the table is looked after."""
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
        connection.check(now_s, is_stranger=table.is_stranger(connection))
    table.sweeping = loop.call_later(SWEEP_S, _sweep, table, loop) if len(table) else None
