"""Errors of the fabric's client, each with a message that says what went wrong and what to do."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hints:
    """Remedies that error messages end with; a program names its own options in them."""

    unreachable: str = "Start one with `macfabric up`."
    untrusted: str = "Pass the ca.pem of the fabric's keys in `trusted`."
    unauthorized: str = "Pass a tenant's key as `key`."
    forbidden: str = "Pass an operator's key as `operator_key`, a tenant's as `key`."


class ClientError(Exception):
    """Request that got no usable answer."""


class InvalidUrlError(ClientError):
    """Text that is not the URL of a fabric."""


class UnreachableError(ClientError):
    """Server that did not answer in time, or not as a fabric does."""


class BrokenOffError(ClientError):
    """Stream that ended before its last event."""


class RefusedError(ClientError):
    """Error that the fabric answered; `param` names the invalid field."""

    def __init__(
        self, message: str, status: int, answer: object, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.answer: dict[str, Any] = answer if isinstance(answer, dict) else {}
        error = self.answer.get("error")
        fields = error if isinstance(error, dict) else {}
        self.code: str | None = fields.get("code")
        self.param: str | None = fields.get("param")
        self.retry_after_s = retry_after_s
