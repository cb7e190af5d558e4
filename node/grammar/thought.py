"""Detection of a thought's end: before it, an answer of any format is free text."""

from dataclasses import dataclass
from enum import Enum, auto

from node.limits import THOUGHT_TAIL_CHARS


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Texts around a model's thought, and the token that begins it if there is one."""

    start: str
    ends: tuple[str, ...]  # all must come, in this order
    start_id: int | None = None
    is_always: bool = False  # all before an answer's last header counts as thought
    holds_calls: bool = False  # an answer may end with a call within it


class Beginning(Enum):
    """Kind of text that an answer begins with."""

    TEXT = auto()
    THOUGHT = auto()  # the prompt has opened it
    EITHER = auto()  # the model chooses


def beginning_of(marks: ThoughtMarks | None, begun: str) -> Beginning:
    """Return the kind of text that comes after `begun`, the part of the answer in the prompt."""
    if marks is None:
        return Beginning.TEXT
    if marks.is_always or begun.rfind(marks.start) > begun.rfind(marks.ends[-1]):
        return Beginning.THOUGHT
    is_done = marks.ends[-1] in begun
    return Beginning.TEXT if is_done or marks.start_id is None else Beginning.EITHER


class ThoughtEndDetector:
    """Detector of the texts that end a thought, however tokens split them."""

    def __init__(self, marks: ThoughtMarks) -> None:
        self._ends = [end.encode() for end in marks.ends]
        self._tail = b""
        assert all(len(end) <= THOUGHT_TAIL_CHARS for end in self._ends), "end marks are short"

    def push(self, text: bytes) -> bool:
        """Read a token's bytes; return whether the thought has ended."""
        self._tail += text
        while self._ends and self._ends[0] in self._tail:
            self._tail = self._tail.partition(self._ends.pop(0))[2]
        self._tail = self._tail[-THOUGHT_TAIL_CHARS:]
        return not self._ends
