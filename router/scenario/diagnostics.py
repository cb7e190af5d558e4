"""Diagnostics of scenario files: each names its place and what to write instead."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

from fabric.errors import RejectedError
from fabric.shown_text import escape_line
from router.limits import QUOTED_NAME_CHARS_MAX, SCENARIO_ERRORS_MAX

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Diagnostic:
    """One error in a file; lines and columns count from 1."""

    line: int
    column: int
    path: str
    text: str


class ScenarioError(RejectedError):
    """Invalid scenario file, with its diagnostics."""

    code = "invalid_scenario"

    def __init__(self, source: str, diagnostics: tuple[Diagnostic, ...], *, is_all: bool) -> None:
        lines = [format_diagnostic(source, diagnostic) for diagnostic in diagnostics]
        if not is_all:
            lines.append(f"{source}: there are more errors, reported once these are fixed")
        super().__init__("\n".join(lines))
        self.diagnostics = diagnostics


def format_diagnostic(source: str, diagnostic: Diagnostic) -> str:
    """Return a diagnostic in the form of compilers, which editors can follow."""
    path = f"{diagnostic.path}: " if diagnostic.path else ""
    return f"{source}:{diagnostic.line}:{diagnostic.column}: {path}{diagnostic.text}"


def format_path(path: Path) -> str:
    """Return a path as text, such as `phases[1].agents`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return shorten(text.removeprefix("."), 2 * QUOTED_NAME_CHARS_MAX)


def shorten(name: str, chars_max: int = QUOTED_NAME_CHARS_MAX) -> str:
    """Return a name on one line, cut to a length for errors."""
    shown = escape_line(name[: chars_max + 1])  # control characters and line ends escaped
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest known name, or lists all of them."""
    names = sorted(known)
    close = get_close_matches(name[:QUOTED_NAME_CHARS_MAX], names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return (
        "there are " + shorten(", ".join(names), 3 * QUOTED_NAME_CHARS_MAX)
        if names
        else "there are none"
    )


@dataclass(slots=True)
class Diagnostics:
    """Diagnostics of one file; reading stops at SCENARIO_ERRORS_MAX."""

    source: str
    _found: list[Diagnostic] = field(default_factory=list)
    _paths: set[Path] = field(default_factory=set)

    def add(self, place: tuple[int, int], path: Path, text: str) -> None:
        if len(self._found) == SCENARIO_ERRORS_MAX:
            raise ScenarioError(self.source, tuple(sorted(self._found)), is_all=False)
        self._paths.add(path)
        self._found.append(Diagnostic(*place, format_path(path), text))

    def cover(self, path: Path) -> bool:
        """Return whether there is a diagnostic at a path or at a part that contains it."""
        return any(path[:length] in self._paths for length in range(1, len(path) + 1))

    def raise_any(self) -> None:
        """Raise ScenarioError if there are any."""
        if self._found:
            raise ScenarioError(self.source, tuple(sorted(self._found)), is_all=True)
