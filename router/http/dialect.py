"""How an API tells what went wrong, also where no route was reached: by path."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.errors import FabricError


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error as JSON: a response's body, or the last event of a stream."""

    body: Any
    event: str | None = None  # the event's name, in dialects that name them


class ErrorDialect(Protocol):
    """Spells errors as one API's clients expect them."""

    def error(self, error: FabricError) -> ErrorBody:
        """Spell an error; `router.http.errors.status_of` is its status."""


class Dialects:
    """Whose clients ask for a path: the dialect of what it begins with, or else the default."""

    def __init__(self, default: ErrorDialect, by_prefix: Mapping[str, ErrorDialect]) -> None:
        self._default = default
        self._by_prefix = by_prefix

    def of(self, path: str) -> ErrorDialect:
        """Return the dialect for a path, which may lead nowhere."""
        for prefix, dialect in self._by_prefix.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                return dialect
        return self._default
