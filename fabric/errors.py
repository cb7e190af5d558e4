"""All errors of the fabric, grouped by the caller's reaction."""

from http import HTTPStatus
from typing import Final

# A write failed and could not be undone: what a restart of that node will find is unknown.
UNDECIDED: Final = "undecided"
# A client used clear text on a TLS port.
HTTPS_REQUIRED: Final = "https_required"


class FabricError(Exception):
    """Base of all errors that macfabric raises on purpose."""

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    code: str = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class HungUpError(FabricError):
    """The client hung up, or the node stops and ends its turns."""

    code = "cancelled"

    def __init__(self) -> None:
        super().__init__("the client hung up")


class RejectedError(FabricError):
    """The request is wrong: repeating it unchanged cannot help."""

    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"


class TooLargeError(RejectedError):
    """A body, prompt or list is over its named limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "too_large"


class NotFoundError(RejectedError):
    """The named object does not exist for this tenant."""

    status = HTTPStatus.NOT_FOUND
    code = "not_found"


class UnauthorizedError(RejectedError):
    """The key is missing or unknown."""

    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"


class ForbiddenError(RejectedError):
    """The key is valid, but does not allow this request."""

    status = HTTPStatus.FORBIDDEN
    code = "forbidden"


class StalledError(RejectedError):
    """A body arrives too slowly, or not at all."""

    status = HTTPStatus.REQUEST_TIMEOUT
    code = "upload_stalled"


class ConflictError(RejectedError):
    """The request contradicts the present state."""

    status = HTTPStatus.CONFLICT
    code = "conflict"


class OldRouterError(ConflictError):
    """The router's term is over: another router may change the fabric."""

    code = "old_router"


class RetryLaterError(FabricError):
    """The same request may succeed after `retry_after_s` seconds."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "unavailable"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class OverloadedError(RetryLaterError):
    """A bounded queue is full."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "overloaded"


class EngineFailedError(RetryLaterError):
    """The compute device failed: all running turns of the node end unsaved."""

    code = "engine_failed"

    def __init__(self) -> None:
        super().__init__("the device that computes failed; the turn was not kept: try again")


class StartFailedError(RetryLaterError):
    """A node could not start; it retries after `retry_after_s` seconds."""

    code = "start_failed"


class RetryElsewhereError(FabricError):
    """This node does not (or no longer) own the agent: look it up again."""

    status = HTTPStatus.MISDIRECTED_REQUEST
    code = "not_owner"


class StaleEpochError(RetryElsewhereError):
    """The caller or this node holds an epoch that was superseded."""

    code = "stale_epoch"


class CorruptDataError(FabricError):
    """Bytes fail a check: quarantine them and treat the read as a miss."""

    code = "corrupt_data"


class FatalError(FabricError):
    """The process cannot continue."""

    code = "fatal"


def require(
    holds: bool,  # noqa: FBT001 - reads as a sentence
    message: str,
    kind: type[FabricError] = CorruptDataError,
    *,
    code: str | None = None,
) -> None:
    """Raise an error of `kind` unless `holds`."""
    if not holds:
        raise kind(message, code=code)
