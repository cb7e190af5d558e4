"""The HTTP server of a node or router: uvicorn with guarded connections."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive

from fabric.errors import TooLargeError
from fabric.hosting.connection_table import ConnectionSlots, ConnectionTable
from fabric.hosting.guarded_connection import connections_in
from fabric.hosting.limits import ACCEPTS_MAX, KEEP_ALIVE_S
from fabric.hosting.tls_gate import over_tls

T = TypeVar("T")


def server_config(
    app: ASGIApp, slots: ConnectionSlots | None, tls: ssl.SSLContext | None, **options: Any
) -> uvicorn.Config:
    """Return the configuration of a server with bounded connections; no `tls` means clear text."""
    table = ConnectionTable(slots)
    http: Any = connections_in(table)
    return uvicorn.Config(
        app,
        http=http if tls is None else over_tls(http, table, tls),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        access_log=False,  # paths hold the names of agents
        server_header=False,
        backlog=ACCEPTS_MAX,  # for asyncio; `HttpServer` sets the system's own
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,  # a client of a proxy is not local, and has to show a key
        **options,
    )


class HttpServer(uvicorn.Server):
    """uvicorn server with a longer backlog than it accepts at once, and no signal handlers."""

    def __init__(
        self, config: uvicorn.Config, backlog: int, on_stop: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._backlog = backlog
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(self._backlog)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop, after `on_stop` has ended the streams that have no end of their own."""
        self._on_stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers, since signals end the whole process, not just the server."""
        yield


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the whole body; raise TooLargeError over the limit."""
    parts: list[bytes] = []
    size_bytes = 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            message = f"the request is over {limit_bytes} bytes"
            raise TooLargeError(message)
        parts.append(part)
    return b"".join(parts)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it and raise ClientDisconnect if the client leaves.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
