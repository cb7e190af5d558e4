"""Errors as Anthropic's clients expect them."""

from http import HTTPStatus
from typing import Any, Final

from fabric.errors import FabricError
from router.http.dialect import ErrorBody
from router.http.errors import status_of

OVERLOADED: Final = 529  # Anthropic's own: everybody's fault but the client's
_KINDS: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INSUFFICIENT_STORAGE: "overloaded_error",
    OVERLOADED: "overloaded_error",
}
THREAD_UNSUPPORTED: Final = "thread_unsupported_request"  # clients then send conversations whole
_TOO_LONG: Final = "context_length_exceeded"


class AnthropicErrors:
    """One shape for every error; its type says what the client should do."""

    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        status = status_of(error)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            status = OVERLOADED
        is_clients = status < HTTPStatus.INTERNAL_SERVER_ERROR
        kind = _KINDS.get(status, "invalid_request_error" if is_clients else "api_error")
        # These words, not a code, are what clients shorten their conversation at.
        message = (
            f"prompt is too long: {error.message}" if error.code == _TOO_LONG else error.message
        )
        told: dict[str, Any] = {"type": kind, "message": message}
        if error.code == THREAD_UNSUPPORTED:
            told["details"] = {"error_code": error.code, "unsupported": ["thread"]}
        return ErrorBody({"type": "error", "error": told}, "error", status)
