"""Parts of answers that clients omit later: how records encode them, and their places in the text.

Encoding: JSON text, one array per answer, the oldest first: a hash of the messages up to it (16
hex digits), its reasoning, the white space before and after its text, its calls (each an array of
arguments as written and id), and optionally its signs (16 hex digits each), which identify the
answer after an earlier message was edited. Later versions may append to each array. Text that does
not parse counts as empty.

Places: templates write thoughts and calls in unknown ways, so any text between two known messages
may belong to any answer there that has thoughts or calls.

    |user ....|assistant <thought> .... <call> {...}|tool ....|
         ----  known     ^^^^^^^^^      ^^^^^^^^^^^^      ----  known messages, and between them

Parts that a template drops, such as earlier thoughts, are found in the encoded answers only.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric.limits import ANSWERS_BYTES_MAX
from fabric.record.message_parts import OtherParts, id_digest
from fabric.record.message_positions import MessagePosition
from fabric.turn.messages import MessageRole

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
        """Return whether clients send back the whole answer."""
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
        return {int(row[0], 16): _answer_of(row) for row in rows}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}


def _answer_of(row: list[Any]) -> OmittedParts:
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


Area = tuple[int, int]  # bytes of the record's text


@dataclass(frozen=True, slots=True)
class BesideTexts:
    """Finder of thoughts and calls in one record."""

    positions: Sequence[MessagePosition]
    parts: Sequence[OtherParts]
    areas_between_marks: Sequence[Area]
    answers: Sequence[OmittedParts] = ()

    def has(self, number: int) -> bool:
        """Return whether an answer has thoughts or calls."""
        return any(parts.number == number and self._is_answer(parts) for parts in self.parts)

    def areas(self, number: int | None = None) -> Iterator[Area]:
        """Yield the parts of the text that may hold thoughts and calls, of one or all messages."""
        places = [place for position in self.positions if (place := position.at) is not None]
        if not places:
            return
        for start, end in self.areas_between_marks:
            text_starts = max(start, places[0][1])
            inside = [place for place in places if place[0] < end and place[1] > text_starts]
            edges = [text_starts, *(at for place in inside for at in place), end]
            for low, high in zip(edges[::2], edges[1::2], strict=True):
                numbers = self.numbers(low, high, 0) if low < high else []
                if numbers and (number is None or number in numbers):
                    yield low, high

    def numbers(self, start: int, end: int, chars: int) -> list[int]:
        """List the answers to which a part of the text between known messages may belong."""
        before = [
            n
            for n, position in enumerate(self.positions)
            if position.at and position.at[1] <= start
        ]
        after = [
            n for n, position in enumerate(self.positions) if position.at and position.at[0] >= end
        ]
        if not before:
            return []
        first, last = before[-1], after[0] if after else len(self.positions) - 1
        return [
            parts.number
            for parts in self.parts
            if first <= parts.number <= last and self._is_answer(parts) and parts.chars >= chars
        ]

    def answers_in(self, start: int, end: int, chars: int) -> list[int]:
        """List the answers whose thoughts or calls a part of the text may be."""
        places = (position.at for position in self.positions if position.at is not None)
        is_message = any(low <= start and end <= high for low, high in places)
        return [] if is_message else self.numbers(start, end, chars)

    def kept_answers_with(self, text: str) -> list[tuple[int, ...]]:
        """List the candidate messages of each kept answer that contains a text."""
        forms = spellings(text)
        answers = (answer for answer in self.answers if _has_any(forms, answer))
        return [numbers for answer in answers if (numbers := tuple(self._numbers_of(answer)))]

    def _numbers_of(self, answered: OmittedParts) -> Iterator[int]:
        ids = {id_digest(call.id) for call in answered.calls if call.id}
        for parts in self.parts:
            if not self._is_answer(parts):
                continue
            if ids.intersection(parts.ids) or (
                not answered.calls and not parts.ids and parts.chars == len(answered.reasoning)
            ):
                yield parts.number

    def _is_answer(self, parts: OtherParts) -> bool:
        is_known = parts.chars > 0 and parts.number < len(self.positions)
        return is_known and self.positions[parts.number].role is MessageRole.ASSISTANT


def spellings(text: str) -> set[bytes]:
    """Return how a template may write a text within arguments of a call."""
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return {form.encode("utf-8", "surrogatepass") for form in forms}


def _has_any(forms: Iterable[bytes], answered: OmittedParts) -> bool:
    texts = [answered.reasoning]
    texts += [text for call in answered.calls for text in (call.arguments, call.id)]
    spelled = [text.encode("utf-8", "surrogatepass") for text in texts]
    return any(form in text for form in forms for text in spelled)
