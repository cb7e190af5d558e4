"""Provenance of a record: its origin, as far as readers need it.

In bytes it is a map of text to text, as it was when it had no type. What does not parse, or comes
from a later version, counts as absent: an agent can continue without any of it.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from fabric.errors import RejectedError
from fabric.ids import NodeName, parse_node_name
from fabric.limits import TURNS_CHARS_MAX
from fabric.turn.prompt_plan import NO_MARKS, PromptMarks

_SERVED, _COPIED, _KEPT, _FORK, _TRUNCATED = "served", "copied", "kept", "fork", "cut"
_HEAD, _ASKED, _CONVERSATION = "head", "asked", "conversation"
_ANSWERS = "answers"
_TURNS = "turns"
_YES = "yes"
_DIGITS_MAX = 18


class TruncatedBy(StrEnum):
    """Cause of a truncated record."""

    FSCK = "fsck"
    HIBERNATED = "hibernated"  # it was cut before it became a file
    CANCELLED = "cancelled"  # its turn ended within its prompt


@dataclass(frozen=True, slots=True)
class LastServed:
    """Node of an agent's last turn, and its seconds of service at that time."""

    node: NodeName
    seconds: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a record; most of it ends with the agent's next turn."""

    served: LastServed | None = None
    copied_revision: int | None = None  # the owner's, that a replica was copied of
    is_kept: bool = False  # a replica that is copied again after its agent's turns
    is_fork: bool = False  # without a turn of its own: only its own id finds it
    truncated_by: TruncatedBy | None = (
        None  # its text begins like conversations of others: likewise
    )
    marks: PromptMarks = NO_MARKS  # of its last prompt
    answers: str = field(default="", repr=False)  # as `fabric/record/answers.py` spells them
    turns: str = field(default="", repr=False)  # as `fabric/record/turn_history.py` spells them

    def to_wire(self) -> dict[str, str]:
        """Encode it for a record's bytes."""
        served = f"{self.served.node}:{self.served.seconds}" if self.served else None
        copied = None if self.copied_revision is None else str(self.copied_revision)
        notes = {
            _SERVED: served,
            _COPIED: copied,
            _KEPT: _YES if self.is_kept else None,
            _FORK: _YES if self.is_fork else None,
            _TRUNCATED: self.truncated_by.value if self.truncated_by else None,
            _HEAD: str(self.marks.head) if self.marks.head else None,
            _ASKED: str(self.marks.question) if self.marks.question else None,
            _CONVERSATION: str(self.marks.conversation) if self.marks.conversation else None,
            _ANSWERS: self.answers or None,
            _TURNS: self.turns or None,
        }
        return {name: text for name, text in notes.items() if text is not None}

    @classmethod
    def from_wire(cls, notes: dict[str, str]) -> "Provenance":
        """Read what any version of `to_wire` wrote."""
        return cls(
            served=_parse_last_served(notes.get(_SERVED, "")),
            copied_revision=_count(notes.get(_COPIED, "")),
            is_kept=_KEPT in notes,
            is_fork=_FORK in notes,
            truncated_by=_truncated_by(notes[_TRUNCATED]) if _TRUNCATED in notes else None,
            marks=PromptMarks(
                head=_count(notes.get(_HEAD, "")) or 0,
                question=_count(notes.get(_ASKED, "")) or 0,
                conversation=_count(notes.get(_CONVERSATION, "")) or 0,
            ),
            answers=notes.get(_ANSWERS, ""),
            turns=_bound_turns(notes.get(_TURNS, "")),
        )


def _bound_turns(turns: str) -> str:
    return turns if len(turns) <= TURNS_CHARS_MAX else ""


def _count(text: str) -> int | None:
    is_count = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    return int(text) if is_count else None


def _parse_last_served(text: str) -> LastServed | None:
    node, _, digits = text.rpartition(":")
    seconds = _count(digits)
    try:
        return None if seconds is None else LastServed(parse_node_name(node), seconds)
    except RejectedError:
        return None


def _truncated_by(text: str) -> TruncatedBy:
    # An unknown cause counts too: a cut record must not be taken for a whole one.
    return TruncatedBy(text) if text in set(TruncatedBy) else TruncatedBy.FSCK
