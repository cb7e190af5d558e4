"""Errors and model lists in the format of Anthropic's API."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

from fabric.errors import FabricError
from router.api.models import ListedModel
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
    """Errors in Anthropic's format; the `type` lets clients decide whether to retry."""

    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        status = status_of(error)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            status = OVERLOADED
        is_clients = status < HTTPStatus.INTERNAL_SERVER_ERROR
        kind = _KINDS.get(status, "invalid_request_error" if is_clients else "api_error")
        # Anthropic's API has no code for this: clients compact a conversation on this phrase.
        message = (
            f"prompt is too long: {error.message}" if error.code == _TOO_LONG else error.message
        )
        body: dict[str, Any] = {"type": kind, "message": message}
        if error.code == THREAD_UNSUPPORTED:
            body["details"] = {"error_code": error.code, "unsupported": ["thread"]}
        return ErrorBody({"type": "error", "error": body}, "error", status)


class AnthropicModels:
    """A model, or all models as one page, in Anthropic's format.

    Source: `ModelInfo` of Anthropic's SDK for Python 2.11.
    """

    def model(self, model: ListedModel) -> dict[str, Any]:
        created = datetime.fromtimestamp(model.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": created,
            "lifecycle": "active",
            "max_input_tokens": model.context_tokens_max,
            "max_tokens": model.completion_tokens_max,
        }

    def listing(self, models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
        ends = (models[0].name, models[-1].name) if models else (None, None)
        data = [self.model(model) for model in models]
        return {"data": data, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
