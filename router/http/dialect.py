"""Error formats of the APIs, chosen by path or header, so that they apply without a route too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from fabric.errors import FabricError


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
        known = (dialect for name, dialect in self._by_header.items() if name in headers)
        return next(known, self._default)
