"""The node's HTTP side: the route on which the router asks for turns, and those of others.

Tokens travel here and not through Ray, where each would cost milliseconds.
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fabric.cluster_secret import http_secret
from fabric.codec import from_plain, parse_json, to_plain
from fabric.control import ErrorReply
from fabric.errors import FabricError, RetryLaterError, TooLargeError, UnauthorizedError
from fabric.generation import (
    CLUSTER_HEADER,
    GENERATE_PATH,
    Event,
    GenerateRequest,
    encode_event,
)
from fabric.limits import BODY_BYTES_MAX, MIB

REQUEST_BYTES_MAX = BODY_BYTES_MAX + MIB  # the client's body and what the router adds

Serve = Callable[[GenerateRequest], AsyncIterator[Event]]


def build_app(cluster_key: bytes, serve: Serve, more: Sequence[Route] = ()) -> Starlette:
    """Build the node's ASGI application; `more` routes check the cluster's secret themselves."""
    secret = http_secret(cluster_key)

    async def generate(request: Request) -> Response:
        try:
            authorize(request, secret)
            asked = from_plain(GenerateRequest, parse_json(await read_body(request)), "request")
            events = serve(asked)
            first = await anext(events)
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return StreamingResponse(_lines(first, events), media_type="application/x-ndjson")

    return Starlette(routes=[Route(GENERATE_PATH, generate, methods=["POST"]), *more])


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


async def read_body(request: Request) -> bytes:
    """Return the whole body; raise TooLargeError over the limit."""
    parts: list[bytes] = []
    size_bytes = 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes > REQUEST_BYTES_MAX:
            message = f"the request is over {REQUEST_BYTES_MAX} bytes"
            raise TooLargeError(message)
        parts.append(part)
    return b"".join(parts)


async def _lines(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    yield encode_event(first)
    try:
        async for event in events:
            yield encode_event(event)
    finally:
        closing: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
        if closing is not None:
            await closing()
