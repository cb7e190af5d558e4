"""Errors and lists of models as OpenAI's clients expect them."""

from http import HTTPStatus
from typing import Any

from fabric.errors import FabricError
from router.http.dialect import ErrorBody
from router.http.errors import status_of

_CLIENT_ERRORS = range(400, 500)


class OpenAiErrors:
    """Errors of every route."""

    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        status = status_of(error)
        kind = "invalid_request_error" if status in _CLIENT_ERRORS else "server_error"
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        body = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        return ErrorBody({"error": body})


class OpenAiModels:
    """Models, alone and as a list."""

    def model(self, name: str, created_s: int) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created_s, "owned_by": "macfabric"}

    def listing(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        return {"object": "list", "data": models}
