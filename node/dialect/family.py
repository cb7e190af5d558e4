"""What one family of models writes around its thoughts and calls."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from node.dialect.call_body import CallBody
from node.dialect.writing import Write
from node.dialect.written_harmony import write_harmony


class Section(StrEnum):
    """What a part of an answer is."""

    TEXT = "text"
    THOUGHT = "thought"
    CALLS = "calls"


MakeBody = Callable[[list[Any] | None], CallBody]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Where calls begin and end, and how they are read."""

    name: str
    starts: tuple[str, ...]
    end: str  # "": only the answer's end
    make: MakeBody
    inner_starts: tuple[str, ...] = ()  # of `starts`, those that belong to what they begin
    bare: MakeBody | None = None  # reads an answer that may be a call without any mark
    write: Write | None = None  # says how they are written, where they must be


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """Where thoughts begin and end."""

    name: str
    start: str
    end: str


@dataclass(frozen=True, slots=True)
class Family:
    """What an answer is read by."""

    thought: ThoughtFormat | None = None
    calls: CallFormat | None = None
    dropped: tuple[str, ...] = ()  # marks that say nothing to a client
    is_harmony: bool = False  # an answer is several messages with headers

    @property
    def write(self) -> Write | None:
        """How calls are written, where that is known."""
        if self.is_harmony:
            return write_harmony
        return self.calls.write if self.calls is not None else None

    def marks(self, section: Section, *, reads_calls: bool) -> tuple[str, ...]:
        """List what ends a section or begins another."""
        calls = self.calls.starts if self.calls is not None and reads_calls else ()
        if section is Section.CALLS:
            return (self.calls.end,) if self.calls is not None and self.calls.end else ()
        if section is Section.THOUGHT:
            assert self.thought is not None, "somebody opened it"
            return (self.thought.end, *calls)
        thought = (self.thought.start,) if self.thought is not None else ()
        return (*thought, *calls, *self.dropped)


PLAIN = Family()
