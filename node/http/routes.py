"""The node's HTTP application: routes of turns, control calls and questions about prompts.

Tokens are sent by HTTP and not through Ray, where each would cost milliseconds; so are the control
calls that a client waits for. HEAD on their route does nothing: with it the router opens a
connection before such a call.
"""

import asyncio
import hmac
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fabric.codec import from_plain, parse_json, to_plain
from fabric.control.calls import CONTROL_PATH, NODE_HEADER, ErrorReply
from fabric.errors import (
    FabricError,
    RetryElsewhereError,
    RetryLaterError,
    UnauthorizedError,
)
from fabric.hosting.connection_table import ConnectionSlots
from fabric.hosting.guarded_connection import admit
from fabric.hosting.http_server import (
    HttpServer,
    read_body,
    server_config,
    unless_disconnected,
)
from fabric.ids import NodeName
from fabric.keys import http_secret
from fabric.limits import CONTROL_BYTES_MAX, KIB, TURN_BODY_BYTES_MAX, TURN_ITEMS_MAX
from fabric.turn.generation import (
    CLUSTER_HEADER,
    GENERATE_PATH,
    ContinuedPrompt,
    Event,
    GenerateRequest,
    TokenCount,
    encode_event,
)

LARGE_BYTES = 64 * KIB
BACKLOG = 512  # connections that wait to be accepted
# Few, as only the router connects, and mlx-lm lowers the limit of open files.
SLOTS = ConnectionSlots(unauthenticated=384, unauthenticated_per_source=384, admitted=768)

Serve = Callable[[GenerateRequest], AsyncIterator[Event]]


def build_app(cluster_key: bytes, serve: Serve, more: Sequence[Route] = ()) -> Starlette:
    """Build the node's ASGI application; `more` routes check the cluster's secret themselves."""
    secret = http_secret(cluster_key)

    async def generate(request: Request) -> Response:
        events = serve(await read_turn(request, secret))
        first = await unless_disconnected(request.receive, anext(events, None))
        if first is None:
            message = "the turn was cancelled before it began"
            raise RetryElsewhereError(message)
        return StreamingResponse(_lines(first, events), media_type="application/x-ndjson")

    return Starlette(routes=[route(GENERATE_PATH, generate), *more])


def route(
    path: str, answer: Callable[[Request], Awaitable[Response]], methods: Sequence[str] = ("POST",)
) -> Route:
    """Return a route that answers errors as the router reads them."""

    async def answer_errors(request: Request) -> Response:
        try:
            return await answer(request)
        except FabricError as error:
            return JSONResponse({"error": to_plain(error_reply(error))}, int(error.status))
        except ClientDisconnect:
            return Response(status_code=400)

    return Route(path, answer_errors, methods=methods)


async def read_turn(request: Request, secret: str) -> GenerateRequest:
    """Return the router's turn request; raise UnauthorizedError for other clients."""
    authorize(request, secret)
    raw = await read_body(request, TURN_BODY_BYTES_MAX)
    # Parsing a long body on this loop would delay the tokens of all streams.
    return await asyncio.to_thread(_parse_turn, raw) if len(raw) > LARGE_BYTES else _parse_turn(raw)


def _parse_turn(raw: bytes) -> GenerateRequest:
    turn: GenerateRequest = from_plain(GenerateRequest, parse_json(raw, TURN_ITEMS_MAX), "request")
    return turn


def http_config(
    app: Starlette, slots: ConnectionSlots | None = None, tls: ssl.SSLContext | None = None
) -> uvicorn.Config:
    """Return the configuration of a node's server."""
    return server_config(app, slots or SLOTS, tls, log_level="warning")


def http_server(app: Starlette, tls: ssl.SSLContext | None) -> HttpServer:
    """Return a node's server."""
    return HttpServer(http_config(app, tls=tls), BACKLOG)


def error_reply(error: FabricError) -> ErrorReply:
    """Describe an error for another process."""
    retry_after_s = error.retry_after_s if isinstance(error, RetryLaterError) else None
    return ErrorReply(int(error.status), error.code, error.message, retry_after_s, error.param)


def authorize(request: Request, secret: str) -> None:
    """Raise UnauthorizedError unless the request is from this cluster's router."""
    sent_secret = request.headers.get(CLUSTER_HEADER, "")
    if not hmac.compare_digest(sent_secret.encode(), secret.encode()):
        message = "only this cluster's router may call a node"
        raise UnauthorizedError(message)
    admit(request.scope, "the router")


async def _lines(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    yield encode_event(first)
    try:
        async for event in events:
            yield encode_event(event)
    finally:
        closing: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
        if closing is not None:
            await closing()


class ControlHttp:
    """Route of control calls; a call is completed even if the router no longer waits for it."""

    def __init__(
        self, name: NodeName, cluster_key: bytes, answer: Callable[[bytes], Awaitable[bytes]]
    ) -> None:
        self._name = name
        self._secret = http_secret(cluster_key)
        self._answer = answer

    def routes(self) -> list[Route]:
        return [route(CONTROL_PATH, self.control, ("HEAD", "POST"))]

    async def control(self, request: Request) -> Response:
        authorize(request, self._secret)
        if request.headers.get(NODE_HEADER) != self._name:
            message = "another node listens here now"
            raise RetryElsewhereError(message, code="wrong_node")
        if request.method == "HEAD":
            return Response(status_code=204)
        raw = await read_body(request, CONTROL_BYTES_MAX)
        return Response(await self._answer(raw), media_type="application/msgpack")


def question_route(
    path: str,
    cluster_key: bytes,
    answer: Callable[[GenerateRequest], Awaitable[TokenCount | ContinuedPrompt]],
) -> Route:
    """Return the route of one question about a prompt; nothing is computed or stored."""
    secret = http_secret(cluster_key)

    async def answer_question(request: Request) -> Response:
        turn = await read_turn(request, secret)
        reply = await unless_disconnected(request.receive, answer(turn))
        return JSONResponse(to_plain(reply))

    return route(path, answer_question)
