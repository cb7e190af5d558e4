"""Error responses: every error, in the dialect of the path that was requested."""

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, ExceptionHandler, Message, Receive, Scope, Send

from fabric.errors import FabricError, RejectedError, RetryElsewhereError, RetryLaterError
from fabric.hosting.tracing import is_tracing
from fabric.hosting.turn_context import about_trace, about_turn
from fabric.ids import Traceparent, TurnId, parse_traceparent, parse_turn_id
from router.fresh_ids import fresh_turn


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error as JSON: a response's body, or the last event of a stream."""

    body: Any
    event: str | None = None  # the event's name, in dialects that name them
    status: int | None = None  # where the dialect has one of its own


class ErrorDialect(Protocol):
    """Error format of one API."""

    def error(self, error: FabricError) -> ErrorBody:
        """Return an error's body; its status is `router.http.errors.status_of` unless set."""


class Dialects:
    """Error formats by prefix of the path, then by a header of the client, then the default."""

    def __init__(
        self,
        default: ErrorDialect,
        by_prefix: Mapping[str, ErrorDialect],
        by_header: Mapping[str, ErrorDialect],
    ) -> None:
        self._default = default
        self._by_prefix = by_prefix
        self._by_header = by_header

    def of(self, scope: Scope) -> ErrorDialect:
        """Return the error format for a request, whose path may have no route."""
        path, headers = scope["path"], Headers(scope=scope)
        for prefix, dialect in self._by_prefix.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return dialect
        chosen = (dialect for name, dialect in self._by_header.items() if name in headers)
        return next(chosen, self._default)


_LOG = logging.getLogger("macfabric.router.http")

REQUEST_ID_HEADERS = (
    b"x-request-id",
    b"request-id",
)  # OpenAI's clients read one, Anthropic's the other
_NAMES = frozenset(REQUEST_ID_HEADERS)
TRACE_HEADER = b"traceparent"
_REQUEST_ID = "macfabric.request_id"
_RETRY_AFTER_S = 1.0
_HTTP_CODES = {
    HTTPStatus.NOT_FOUND: "unknown_url",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
}


def status_of(error: FabricError) -> int:
    """Return an error's status for clients, which cannot choose another node."""
    if isinstance(error, RetryElsewhereError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return int(error.status)


def error_response(error: FabricError, dialect: ErrorDialect) -> JSONResponse:
    """Return the response for an error, with `Retry-After` where waiting helps."""
    headers = {}
    wait_s = _RETRY_AFTER_S if isinstance(error, RetryElsewhereError) else None
    if isinstance(error, RetryLaterError):
        wait_s = error.retry_after_s
    if wait_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    answer = dialect.error(error)
    return JSONResponse(answer.body, answer.status or status_of(error), headers)


def unknown_error(error: Exception) -> FabricError:
    """Return the error for an unexpected exception, without its text: that may hold a prompt."""
    trace, where = error.__traceback__, "?"
    while trace is not None:
        where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    _LOG.error("unexpected %s at %s", type(error).__name__, where)
    message = "the server failed on this request"
    return FabricError(message)


def error_handlers(dialects: Dialects) -> dict[type[Exception], ExceptionHandler]:
    """Return handlers for our own errors and for Starlette's: unknown paths and methods."""

    async def on_fabric_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, FabricError), "registered for FabricError alone"
        return error_response(error, dialects.of(request.scope))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException alone"
        refused = _refusal_of(error, request)
        answer = dialects.of(request.scope).error(refused)
        return JSONResponse(answer.body, answer.status or refused.status, error.headers)

    return {FabricError: on_fabric_error, HTTPException: on_http_error}


def _refusal_of(error: HTTPException, request: Request) -> FabricError:
    code = _HTTP_CODES.get(HTTPStatus(error.status_code), "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message += _hint(request)
    refused = FabricError(message, code=code)
    refused.status = error.status_code
    return refused


def _hint(request: Request) -> str:
    """Suggest the right path to clients of other servers or with another base URL."""
    meant = f"/v1{request.url.path}"
    if any(getattr(route, "path", None) == meant for route in request.app.routes):
        return f"; it is {meant} here: let the client's base URL end with /v1"
    return "; OpenAI's API is below /v1, Anthropic's at /v1/messages, and /openapi.json lists all"


def request_id_of(scope: Scope) -> TurnId:
    """Return a request's id, which is also its turn's."""
    name: TurnId = scope[_REQUEST_ID]
    return name


def _request_id(scope: Scope) -> TurnId:
    """Return the id that the client gave its request, if it is valid, or a fresh one."""
    ids = [value for name, value in scope["headers"] if name == REQUEST_ID_HEADERS[0]]
    with suppress(RejectedError):
        if len(ids) == 1:
            return parse_turn_id(ids[0].decode("latin-1"))
    return fresh_turn()


def _client_trace(scope: Scope) -> Traceparent | None:
    """Return the client's span of which the request is a part, if it sent a valid one."""
    traces = [value for name, value in scope["headers"] if name == TRACE_HEADER]
    with suppress(RejectedError):
        if is_tracing() and len(traces) == 1:
            return parse_traceparent(traces[0].decode("latin-1").strip())
    return None


class ErrorBoundary:
    """Middleware: sets the request id, and answers any exception of the middleware inside it."""

    def __init__(self, app: ASGIApp, dialects: Dialects) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application; no exception leaves it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _request_id(scope)
        scope[_REQUEST_ID] = name
        shown = [(header, name.encode()) for header in REQUEST_ID_HEADERS]
        dialect = self._dialects.of(scope)
        has_started = False

        async def named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                # A standby's answer has those of the active router already.
                own = [each for each in message.get("headers", []) if each[0] not in _NAMES]
                message["headers"] = [*own, *shown]
            await send(message)

        try:
            with about_turn(name), about_trace(_client_trace(scope)):
                await self._app(scope, receive, named)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # the server is stopping
            if not has_started:
                message = "the router is stopping"
                stopping = RetryLaterError(message, code="stopping")
                await error_response(stopping, dialect)(scope, receive, named)
        except Exception as error:  # noqa: BLE001 - the last place that can answer it
            fabric_error = error if isinstance(error, FabricError) else unknown_error(error)
            if not has_started:
                await error_response(fabric_error, dialect)(scope, receive, named)
