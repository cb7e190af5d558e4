"""Errors returned by a node, rebuilt as the FabricError that the node raised."""

from http import HTTPStatus

from fabric.errors import (
    ConflictError,
    FabricError,
    NotFoundError,
    OverloadedError,
    RejectedError,
    RetryElsewhereError,
    RetryLaterError,
    StaleEpochError,
    StartFailedError,
    TooLargeError,
)

_REJECTED: dict[int, type[RejectedError]] = {
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: TooLargeError,
}
_RETRY_AFTER_S = 1.0
_CLIENT_ERRORS = range(400, 500)


def remote_error(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_s: float | None = None,
) -> FabricError:
    """Return the FabricError for a status and code; callers react to its class."""
    wait_s = _RETRY_AFTER_S if retry_after_s is None else retry_after_s
    if status == HTTPStatus.UNAUTHORIZED:
        # The router's own secret was refused: a fault of the cluster, not of the client.
        text = "the node refused this router's cluster secret"
        return FabricError(text, code="cluster_secret_refused")
    if status == HTTPStatus.MISDIRECTED_REQUEST:
        stale = code == StaleEpochError.code
        return (StaleEpochError if stale else RetryElsewhereError)(message, code=code)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return OverloadedError(message, retry_after_s=wait_s, code=code)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        kind = StartFailedError if code == StartFailedError.code else RetryLaterError
        return kind(message, retry_after_s=wait_s, code=code)
    if status in _CLIENT_ERRORS:
        return _REJECTED.get(status, RejectedError)(message, code=code, param=param)
    error = FabricError(message, code=code)
    if status == HTTPStatus.INSUFFICIENT_STORAGE:  # the node's disk is full or refuses writes
        error.status = HTTPStatus.INSUFFICIENT_STORAGE
    return error
