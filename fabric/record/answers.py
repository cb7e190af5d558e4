"""Parts of an agent's answers that clients leave out of later requests, or spell otherwise.

In a record's bytes it is JSON text: for each answer, the oldest first, an array of its place in the
conversation (16 hex digits), its reasoning, the white space around its text, and its calls, each an
array of the arguments as they were written and the id; then its signs (16 hex digits each), if it
can be known again where its place is another. Later versions may append to each array. What does
not parse counts as empty.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric.limits import ANSWERS_BYTES_MAX

_SIGN_DIGITS = 16
_SIGNS_MAX = 8  # of one answer: there are five kinds
_SIGNS = 5  # where an array has them
_SPELLED_CHARS_MAX = 8 * ANSWERS_BYTES_MAX  # JSON takes up to six characters for one


@dataclass(frozen=True, slots=True)
class CallWritten:
    """One call as the model wrote it, identified by its name."""

    arguments: str
    id: str


@dataclass(frozen=True, slots=True)
class OmittedParts:
    """Parts of an answer that clients may not send back."""

    reasoning: str = ""
    space_before: str = ""  # white space around its text
    space_after: str = ""
    calls: tuple[CallWritten, ...] = ()
    signs: tuple[int, ...] = ()  # any of which identifies it after an edit before it

    @property
    def is_empty(self) -> bool:
        """Return whether clients send back all of it."""
        return not (self.reasoning or self.space_before or self.space_after or self.calls)

    @property
    def size_bytes(self) -> int:
        """Bytes that count against the limit; raise UnicodeEncodeError for lone surrogates."""
        texts = [self.reasoning, self.space_before, self.space_after]
        texts += [text for call in self.calls for text in (call.arguments, call.id)]
        return sum(len(text.encode()) for text in texts) + len(self.signs) * _SIGN_DIGITS


Answers = Mapping[int, OmittedParts]  # by their places: hashes of all messages up to each


def encode_answers(answers: Answers) -> str:
    """Encode answers for a record's bytes; empty if there are none."""
    rows = [
        [
            f"{place:016x}",
            answer.reasoning,
            answer.space_before,
            answer.space_after,
            [[call.arguments, call.id] for call in answer.calls],
            *(["".join(f"{sign:016x}" for sign in answer.signs)] if answer.signs else []),
        ]
        for place, answer in answers.items()
    ]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")) if rows else ""


def decode_answers(text: str) -> dict[int, OmittedParts]:
    """Decode answers of this or a later version."""
    if not text or len(text) > _SPELLED_CHARS_MAX:
        return {}
    try:
        rows = json.loads(text)
        return {int(row[0], 16): _answered(row) for row in rows}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}


def _answered(row: list[Any]) -> OmittedParts:
    calls = tuple(CallWritten(call[0], call[1]) for call in row[4])
    texts = [*row[1:4], *(text for call in calls for text in (call.arguments, call.id))]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return OmittedParts(
        row[1], row[2], row[3], calls, _signs(row[_SIGNS]) if len(row) > _SIGNS else ()
    )


def _signs(spelled: Any) -> tuple[int, ...]:
    if not isinstance(spelled, str) or len(spelled) > _SIGNS_MAX * _SIGN_DIGITS:
        return ()
    starts = range(0, len(spelled), _SIGN_DIGITS)
    try:
        return tuple(int(spelled[at : at + _SIGN_DIGITS], 16) for at in starts)
    except ValueError:
        return ()
