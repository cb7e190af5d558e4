"""The node's HTTP side: the route on which the router asks for turns, and those of others.

Tokens travel here and not through Ray, where each would cost milliseconds.
"""

import asyncio
import hmac
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fabric.codec import from_plain, parse_json, to_plain
from fabric.control.calls import ErrorReply
from fabric.errors import (
    FabricError,
    RetryElsewhereError,
    RetryLaterError,
    TooLargeError,
    UnauthorizedError,
)
from fabric.http_guard.connection_table import Places
from fabric.http_guard.guarded_connection import admit
from fabric.http_guard.http_options import bounded_options
from fabric.keys.cluster_secret import http_secret
from fabric.limits import KIB, TURN_BODY_BYTES_MAX, TURN_ITEMS_MAX
from fabric.turn.generation import (
    CLUSTER_HEADER,
    GENERATE_PATH,
    Event,
    GenerateRequest,
    encode_event,
)

LARGE_BYTES = 64 * KIB
BACKLOG = 512  # connections that wait to be accepted
# Few strangers: only the router has business here, and mlx-lm lowers the limit of open files.
PLACES = Places(strangers=384, strangers_per_source=384, admitted=768)

T = TypeVar("T")
Serve = Callable[[GenerateRequest], AsyncIterator[Event]]


def build_app(cluster_key: bytes, serve: Serve, more: Sequence[Route] = ()) -> Starlette:
    """Build the node's ASGI application; `more` routes check the cluster's secret themselves."""
    secret = http_secret(cluster_key)

    async def generate(request: Request) -> Response:
        try:
            events = serve(await read_turn(request, secret))
            first = await unless_left(anext(events, None), request.receive)
            if first is None:
                message = "the node was told to end this turn before it began"
                raise RetryElsewhereError(message)
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return StreamingResponse(_lines(first, events), media_type="application/x-ndjson")

    return Starlette(routes=[Route(GENERATE_PATH, generate, methods=["POST"]), *more])


async def read_turn(request: Request, secret: str) -> GenerateRequest:
    """Return what the router asks for; raise UnauthorizedError for anybody else."""
    authorize(request, secret)
    raw = await read_body(request)
    # A long one would keep everybody's tokens waiting on this loop.
    return await asyncio.to_thread(_asked, raw) if len(raw) > LARGE_BYTES else _asked(raw)


def _asked(raw: bytes) -> GenerateRequest:
    asked: GenerateRequest = from_plain(GenerateRequest, parse_json(raw, TURN_ITEMS_MAX), "request")
    return asked


def http_config(
    app: Starlette, places: Places | None = None, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """Say how a node serves the router, and whoever else finds its port."""
    options = bounded_options(HttpToolsProtocol, SSLProtocol, places or PLACES, tls)
    return uvicorn.Config(app, log_level="warning", **options)


class HttpServer(uvicorn.Server):
    """Lets many connections wait to be accepted, and in a few at a time."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def error_reply(error: FabricError) -> ErrorReply:
    """Describe an error for another process."""
    retry_after_s = error.retry_after_s if isinstance(error, RetryLaterError) else None
    return ErrorReply(int(error.status), error.code, error.message, retry_after_s, error.param)


def error_response(error: FabricError) -> JSONResponse:
    """Answer with an error as the router reads it."""
    return JSONResponse({"error": to_plain(error_reply(error))}, int(error.status))


def authorize(request: Request, secret: str) -> None:
    """Raise UnauthorizedError unless this cluster's router asks."""
    given = request.headers.get(CLUSTER_HEADER, "")
    if not hmac.compare_digest(given.encode(), secret.encode()):
        message = "only this cluster's router may ask a node"
        raise UnauthorizedError(message)
    admit(request.scope, "the router")


async def read_body(request: Request, limit_bytes: int = TURN_BODY_BYTES_MAX) -> bytes:
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


async def unless_left(work: Awaitable[T], receive: Receive) -> T:
    """Return what comes of work; end it, and raise ClientDisconnect, if nobody waits any more."""
    coming = asyncio.ensure_future(work)
    gone = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise ClientDisconnect
        return coming.result()
    finally:
        gone.cancel()
        if not coming.done():
            coming.cancel()  # which ends a turn
            await asyncio.wait({coming})


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lines(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    yield encode_event(first)
    try:
        async for event in events:
            yield encode_event(event)
    finally:
        closing: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
        if closing is not None:
            await closing()
