"""Every error as OpenAI's clients expect it: one shape, whatever went wrong."""

import asyncio
import logging
import math
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.errors import FabricError, RetryElsewhereError, RetryLaterError
from router.fresh_ids import fresh_name

_LOG = logging.getLogger("macfabric.router.http")

REQUEST_ID_HEADER = b"x-request-id"
_RETRY_AFTER_S = 1.0
_CLIENT_ERRORS = range(400, 500)
_HTTP_CODES = {
    HTTPStatus.NOT_FOUND: "unknown_url",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
}


def status_of(error: FabricError) -> int:
    """Return the status for clients, who cannot ask another node themselves."""
    if isinstance(error, RetryElsewhereError):
        return HTTPStatus.SERVICE_UNAVAILABLE
    return int(error.status)


def error_body(error: FabricError) -> dict[str, Any]:
    """Spell an error as OpenAI does."""
    return _body(status_of(error), error.message, error.code, error.param)


def error_response(error: FabricError) -> JSONResponse:
    """Answer with an error, and with the time to wait where waiting helps."""
    headers = {}
    wait_s = _RETRY_AFTER_S if isinstance(error, RetryElsewhereError) else None
    if isinstance(error, RetryLaterError):
        wait_s = error.retry_after_s
    if wait_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    return JSONResponse(error_body(error), status_of(error), headers)


def unknown_error(error: Exception) -> FabricError:
    """Stand in for an exception nobody expected; its text may hold a prompt, so it is dropped."""
    trace, where = error.__traceback__, "?"
    while trace is not None:
        where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    _LOG.error("unexpected %s at %s", type(error).__name__, where)
    message = "the server failed on this request"
    return FabricError(message)


def _body(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    kind = "invalid_request_error" if status in _CLIENT_ERRORS else "server_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def on_fabric_error(_request: Request, error: Exception) -> Response:
    """Answer what was raised on purpose."""
    assert isinstance(error, FabricError), "registered for FabricError alone"
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors: no such route, wrong method."""
    assert isinstance(error, HTTPException), "registered for HTTPException alone"
    status = error.status_code
    code = _HTTP_CODES.get(HTTPStatus(status), "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    return JSONResponse(_body(status, message, code, None), status, error.headers)


class ErrorBoundary:
    """Outermost layer: names the request, and answers whatever the others let through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application; nothing leaves here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = fresh_name("req_").encode()
        has_started = False

        async def named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", []), (REQUEST_ID_HEADER, name)]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:  # only a server that stops does that
            if not has_started:
                message = "the router is stopping"
                stopping = RetryLaterError(message, code="stopping")
                await error_response(stopping)(scope, receive, named)
        except Exception as error:  # noqa: BLE001 - the last place where one can be answered
            known = error if isinstance(error, FabricError) else unknown_error(error)
            if not has_started:
                await error_response(known)(scope, receive, named)
