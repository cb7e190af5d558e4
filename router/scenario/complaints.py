"""What is wrong with a scenario: every complaint has its place, and says what to write instead."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

from fabric.errors import RejectedError
from fabric.shown_text import escape_line
from router.limits import NAME_CHARS_TOLD, SCENARIO_ERRORS_MAX

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Complaint:
    """One thing that is wrong; lines and columns count from 1."""

    line: int
    column: int
    path: str
    text: str


class ScenarioError(RejectedError):
    """A scenario that cannot be read, with all that is wrong with it."""

    code = "invalid_scenario"

    def __init__(self, source: str, complaints: tuple[Complaint, ...], *, is_all: bool) -> None:
        lines = [worded(source, complaint) for complaint in complaints]
        if not is_all:
            lines.append(f"{source}: and more, which is told once these are gone")
        super().__init__("\n".join(lines))
        self.complaints = complaints


def worded(source: str, complaint: Complaint) -> str:
    """Spell a complaint as compilers do, so that editors find the place."""
    path = f"{complaint.path}: " if complaint.path else ""
    return f"{source}:{complaint.line}:{complaint.column}: {path}{complaint.text}"


def spelled(path: Path) -> str:
    """Spell a path as one would ask for it: `phases[1].agents`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return told(text.removeprefix("."), 2 * NAME_CHARS_TOLD)


def told(name: str, chars_max: int = NAME_CHARS_TOLD) -> str:
    """Return as much of a name as an error tells."""
    shown = escape_line(name[: chars_max + 1])  # a line of its own, whatever it holds
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def meant(name: str, known: Iterable[str]) -> str:
    """Say which of the known names is meant, or list them."""
    names = sorted(known)
    close = get_close_matches(name[:NAME_CHARS_TOLD], names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return "there are " + told(", ".join(names), 3 * NAME_CHARS_TOLD) if names else "there are none"


@dataclass(slots=True)
class Complaints:
    """All complaints about one file; with one too many, reading ends: it would take long."""

    source: str
    _found: list[Complaint] = field(default_factory=list)
    _paths: set[Path] = field(default_factory=set)

    def add(self, place: tuple[int, int], path: Path, text: str) -> None:
        if len(self._found) == SCENARIO_ERRORS_MAX:
            raise ScenarioError(self.source, tuple(sorted(self._found)), is_all=False)
        self._paths.add(path)
        self._found.append(Complaint(*place, spelled(path), text))

    def concern(self, path: Path) -> bool:
        """Whether something is wrong with what is there, or with what it is a part of."""
        return any(path[:length] in self._paths for length in range(1, len(path) + 1))

    def raise_any(self) -> None:
        """Raise ScenarioError where anything was found."""
        if self._found:
            raise ScenarioError(self.source, tuple(sorted(self._found)), is_all=True)
