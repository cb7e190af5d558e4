"""Errors as OpenAI's clients expect them."""

from http import HTTPStatus

from fabric.errors import FabricError
from router.http.dialect import ErrorBody
from router.http.errors import status_of

_CLIENT_ERRORS = range(400, 500)


class OpenAiErrors:
    """One shape for every error of every route."""

    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        status = status_of(error)
        kind = "invalid_request_error" if status in _CLIENT_ERRORS else "server_error"
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        return ErrorBody({"error": told})
