"""Where a model's thought ends: what comes before it is free in any format."""

from dataclasses import dataclass
from enum import Enum, auto

from node.limits import THOUGHT_TAIL_CHARS


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The texts around a model's thought, and the one token that begins it where there is one."""

    start: str
    ends: tuple[str, ...]  # all of them, in this order
    start_id: int | None = None
    is_always: bool = False  # each answer begins with what counts as one: headers of messages
    holds_calls: bool = False  # and ends with a call within it


class Beginning(Enum):
    """What an answer begins with."""

    TEXT = auto()
    THOUGHT = auto()  # the prompt has opened it
    EITHER = auto()  # as the model likes


def beginning_of(marks: ThoughtMarks | None, begun: str) -> Beginning:
    """Say what comes behind `begun`, which the prompt has of the answer already."""
    if marks is None:
        return Beginning.TEXT
    if marks.is_always or begun.rfind(marks.start) > begun.rfind(marks.ends[-1]):
        return Beginning.THOUGHT
    is_done = marks.ends[-1] in begun
    return Beginning.TEXT if is_done or marks.start_id is None else Beginning.EITHER


class ThoughtEnd:
    """Looks for the texts that end a thought, whatever tokens they come in."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._ends = [end.encode() for end in marks.ends]
        self._tail = b""
        assert all(len(end) <= THOUGHT_TAIL_CHARS for end in self._ends), "they are a word or two"

    def push(self, text: bytes) -> bool:
        """Take a token's bytes; say whether the thought is over."""
        self._tail += text
        while self._ends and self._ends[0] in self._tail:
            self._tail = self._tail.partition(self._ends.pop(0))[2]
        self._tail = self._tail[-THOUGHT_TAIL_CHARS:]
        return not self._ends
