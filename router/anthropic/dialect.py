"""Errors and lists of models as Anthropic's clients expect them."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from fabric.errors import FabricError
from router.http.errors import ErrorBody, status_of

OVERLOADED: Final = 529  # Anthropic's status for a server that is overloaded
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
    """Errors, whose type says what the client should do."""

    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        status = status_of(error)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            status = OVERLOADED
        is_clients = status < HTTPStatus.INTERNAL_SERVER_ERROR
        kind = _KINDS.get(status, "invalid_request_error" if is_clients else "api_error")
        # Clients shorten their conversation when they see these words; there is no code.
        message = (
            f"prompt is too long: {error.message}" if error.code == _TOO_LONG else error.message
        )
        body: dict[str, Any] = {"type": kind, "message": message}
        if error.code == THREAD_UNSUPPORTED:
            body["details"] = {"error_code": error.code, "unsupported": ["thread"]}
        return ErrorBody({"type": "error", "error": body}, "error", status)


class AnthropicModels:
    """Models, alone and as one page."""

    def model(self, name: str, created_s: int) -> dict[str, Any]:
        created = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"type": "model", "id": name, "display_name": name, "created_at": created}

    def listing(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        ends = (models[0]["id"], models[-1]["id"]) if models else (None, None)
        return {"data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
