"""How an API tells what went wrong, also where no route was reached: by path, or by a header."""

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
    """Spells errors as one API's clients expect them."""

    def error(self, error: FabricError) -> ErrorBody:
        """Spell an error; `router.http.errors.status_of` is its status."""


class Dialects:
    """Whose clients ask: by what the path begins with, by a header of theirs, or the default."""

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
        """Return the dialect for a request, whose path may lead nowhere."""
        path, headers = scope["path"], Headers(scope=scope)
        for prefix, dialect in self._by_prefix.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return dialect
        found = (dialect for name, dialect in self._by_header.items() if name in headers)
        return next(found, self._default)
