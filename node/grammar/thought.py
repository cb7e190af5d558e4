"""Where a model's thought ends: what comes before it is free in any format."""

from dataclasses import dataclass
from enum import Enum, auto

from fabric.limits import THOUGHT_TAIL_CHARS


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The texts around a model's thought, and the one token that begins it where there is one."""

    start: str
    end: str
    start_id: int | None


class Beginning(Enum):
    """What an answer begins with."""

    TEXT = auto()
    THOUGHT = auto()  # the prompt has opened it
    EITHER = auto()  # as the model likes


def beginning_of(marks: ThoughtMarks | None, begun: str) -> Beginning:
    """Say what comes behind `begun`, which the prompt has of the answer already."""
    if marks is None:
        return Beginning.TEXT
    if begun.rfind(marks.start) > begun.rfind(marks.end):
        return Beginning.THOUGHT
    is_done = marks.end in begun
    return Beginning.TEXT if is_done or marks.start_id is None else Beginning.EITHER


class ThoughtEnd:
    """Looks for the text that ends a thought, whatever tokens it comes in."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._end = marks.end.encode()
        self._tail = b""
        assert len(self._end) <= THOUGHT_TAIL_CHARS, "a marker is a word or two"

    def push(self, text: bytes) -> bool:
        """Take a token's bytes; say whether the thought is over."""
        self._tail += text
        if self._end in self._tail:
            return True
        self._tail = self._tail[-THOUGHT_TAIL_CHARS:]
        return False
