"""Spans: places of directives in an agent's record, set once and found again later.

    by number      |system|user|call|result ....|user|        messages 0, 1, 2 …
    by text        a text that occurs once, or each place where it occurs
    by tokens      of the record, as it lists them

A span in a message is identified by the message's digest, so that it matches when a client sends
the message again; for clients that do not, the record's own text is replaced.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile
from typing import NoReturn

from fabric.edit_mode import EditMode
from fabric.errors import ConflictError, RejectedError
from fabric.ids import OperationId
from fabric.limits import DIRECTIVES_MAX, EDIT_SINK_TOKENS
from fabric.record.answers import BesideTexts, decode_answers, spellings
from fabric.record.directive import Directive, dropped_text, live_directives, overlap, text_digest
from fabric.record.hashed_text import hash_text
from fabric.record.manifest import Manifest
from fabric.record.message_parts import id_digest
from fabric.record.message_positions import MessagePosition, MessagePositions
from fabric.turn.messages import MessageRole

_CONTINUES, _LEADS = 0xC0, 0x80  # how a byte within a character begins


@dataclass(frozen=True, slots=True)
class WantedSpan:
    """Span that a client wants to edit: messages, characters, a text or tokens."""

    param: str  # the request's parameter, for errors
    operation: OperationId
    mode: EditMode
    replacement: str | None = field(repr=False)
    made_s: float = 0.0
    made_by: str | None = None
    first: int | None = None  # number of the first message
    last: int | None = None  # number of the last message, inclusive
    chars: tuple[int, int] | None = None  # of the first message
    text: str | None = field(default=None, repr=False)
    is_every: bool = False
    tokens: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Spans:
    """Resolver of spans in one record."""

    record: Manifest
    marks: Collection[int]  # special tokens of the template
    salt: bytes
    text: bytes = field(init=False)
    positions: tuple[MessagePosition, ...] = field(init=False)
    _beside: BesideTexts = field(init=False)

    def __post_init__(self) -> None:
        """Encode the text once."""
        object.__setattr__(self, "text", self.record.text.encode("utf-8", "surrogatepass"))
        positions = self.record.positions or MessagePositions(())
        object.__setattr__(self, "positions", positions.messages)
        answers = decode_answers(self.record.provenance.answers).values()
        areas = list(self._parts())
        beside = BesideTexts(positions.messages, self.record.parts or (), areas, tuple(answers))
        object.__setattr__(self, "_beside", beside)

    def check_known(self, directive: Directive) -> None:
        """Raise RejectedError unless the message that a directive names is known."""
        parts = self.record.parts
        if parts is None or self.record.positions is None:
            return  # an older record, or a prompt that was no conversation
        if directive.result_of is not None:
            called = id_digest(directive.result_of)
            if not any(called in part.ids for part in parts):
                message = f"No call with the id '{directive.result_of}' is in the conversation."
                raise RejectedError(message, code="call_not_found", param="tool_call_id")
        elif directive.message_digest is not None:
            texts = {part.digest for part in parts} | {message.digest for message in self.positions}
            if directive.message_digest not in texts:
                message = "No message of the conversation has that role and content."
                raise RejectedError(message, code="message_not_found", param="message")

    def directives(self, wanted: Sequence[WantedSpan]) -> tuple[Directive, ...]:
        """Resolve all spans; raise RejectedError for the first invalid one."""
        directives: list[tuple[str, Directive]] = []
        for span in wanted:
            directives += ((span.param, directive) for directive in self._place_directive(span))
            if len(directives) > DIRECTIVES_MAX:
                _refuse(
                    span, "too_many_directives", f"it matches more than {DIRECTIVES_MAX} directives"
                )
        for (_, one), (param, other) in combinations(directives, 2):
            if overlap(one, other):
                message = f"Invalid '{param}': it overlaps another span of this request."
                raise RejectedError(message, code="overlapping_spans", param=param)
        for param, directive in directives:
            overlapping = next(
                (d for d in live_directives(self.record.directives) if overlap(d, directive)), None
            )
            if overlapping is not None:
                earlier = overlapping.operation
                message = (
                    f"Invalid '{param}': operation {earlier} edits it already; undo that first."
                )
                raise ConflictError(message, code="overlapping_spans", param=param)
        return tuple(directive for _, directive in directives)

    def _place_directive(self, wanted: WantedSpan) -> Iterator[Directive]:
        if wanted.tokens is not None:
            yield from self._at(wanted, *self._bytes_of_tokens(wanted, *wanted.tokens))
        elif wanted.text is not None:
            yield from self._of_text(wanted, wanted.text)
        elif wanted.chars is not None:
            yield self._of_chars(wanted, self._message(wanted, wanted.first), *wanted.chars)
        else:
            first = wanted.first or 0
            numbers = range(first, (first if wanted.last is None else wanted.last) + 1)
            self._message(wanted, numbers[-1] if numbers else None)
            if not (wanted.replacement or any(map(self._has_content, numbers))):
                _refuse(wanted, "nothing_to_edit", "the messages have no text, thought or call")
            for number in numbers:
                text = wanted.replacement if number == first else None
                yield self._of_message(wanted, number, text)

    # --- messages ----------------------------------------------------------------------------

    def _message(self, wanted: WantedSpan, number: int | None) -> int:
        if not self.positions:
            why = "the agent's messages are not recorded: select a text or tokens instead"
            _refuse(wanted, "no_messages", why)
        if number is None or not 0 <= number < len(self.positions):
            _refuse(wanted, "out_of_range", f"the messages are 0 to {len(self.positions) - 1}")
        if self.positions[number].role is MessageRole.SYSTEM:
            _refuse_system(wanted)
        return number

    def _has_parts(self, number: int) -> bool:
        return any(part.number == number and part.chars for part in self.record.parts or ())

    def _has_content(self, number: int) -> bool:
        is_unknown = self.record.parts is None  # an older record
        return is_unknown or self.positions[number].chars > 0 or self._has_parts(number)

    def _of_message(self, wanted: WantedSpan, number: int, replacement: str | None) -> Directive:
        position = self.positions[self._message(wanted, number)]
        if self._has_parts(number) and position.role is MessageRole.ASSISTANT:
            # How a template writes the rest is unknown: only a whole conversation removes it.
            directive = self._directive(wanted, replacement, number, None, None, position.chars)
            return replace(directive, dropped=None)
        return self._directive(wanted, replacement, number, None, position.at, position.chars)

    def _of_chars(self, wanted: WantedSpan, number: int, start: int, end: int) -> Directive:
        position = self.positions[number]
        if not 0 <= start < end <= position.chars:
            _refuse(wanted, "out_of_range", f"the message's characters are 0 to {position.chars}")
        at = None
        if position.start is not None and not position.is_edited:
            shown = self.text[position.start : position.end].decode("utf-8", "replace")
            low, high = max(0, start - position.lead_chars), max(0, end - position.lead_chars)
            before, within = len(shown[:low].encode()), len(shown[low:high].encode())
            at = (position.start + before, position.start + before + within) if within else None
        return self._directive(
            wanted, wanted.replacement or "", number, (start, end), at, end - start
        )

    # --- texts and tokens --------------------------------------------------------------------

    def _of_text(self, wanted: WantedSpan, text: str) -> Iterator[Directive]:
        """Replace a text in the record's text, and in answer parts that the template left out."""
        places = self._text_places(wanted, text)
        shown = {n for start, end in places for n in self._beside.answers_in(start, end, len(text))}
        hidden = [
            numbers
            for numbers in self._beside.kept_answers_with(text)
            if not shown & {*numbers} and (wanted.first is None or wanted.first in numbers)
        ]
        count = len(places) + len(hidden)
        if not count:
            edited = any(m.is_edited for m in self.positions)
            why = "; earlier directives have already removed some text" if edited else ""
            _refuse(wanted, "text_not_found", "no message that can be edited has that text" + why)
        if count > 1 and not wanted.is_every:
            why = f"that text occurs {count} times: select a message, or set 'every'"
            _refuse(wanted, "text_ambiguous", why)
        for place in places:
            yield from self._at(wanted, *place)
        for number in sorted({number for numbers in hidden for number in numbers}):
            if wanted.first in (None, number):
                directive = self._directive(wanted, wanted.replacement or "", number, None, None, 0)
                yield replace(
                    directive, besides_text=hash_text(text), dropped=dropped_text(self.salt, text)
                )

    def _text_places(self, wanted: WantedSpan, text: str) -> list[tuple[int, int]]:
        """List the positions of a text in the parts that may be edited."""
        sought = text.encode("utf-8", "surrogatepass")
        areas = list(self._areas(wanted))
        # Count overlapping occurrences too: the client could mean either one.
        step = len(sought) if wanted.is_every else 1
        places = [place for area in areas for place in _places(self.text, sought, area, step)]
        for spelled in sorted(spellings(text)):
            for area in self._beside.areas(wanted.first):
                places += _places(self.text, spelled, area, len(spelled) if wanted.is_every else 1)
        return sorted(set(places))

    def _areas(self, wanted: WantedSpan) -> Iterator[tuple[int, int]]:
        """Yield the areas of the text that may be edited and contain no special tokens."""
        if wanted.first is not None:
            position = self.positions[self._message(wanted, wanted.first)]
            if (position.at is None or position.is_edited) and self._beside.has(wanted.first):
                return
            if position.at is None or position.is_edited:
                _refuse(wanted, "text_not_found", _unknown_place_reason(wanted.first, position))
            yield position.at
            return
        for position in self.positions:
            if position.at is None or position.is_edited or position.role is MessageRole.SYSTEM:
                continue
            yield position.at
        yield from self._tail_areas()

    @property
    def _tail(self) -> int:
        """End of the last known message; clients do not resend the text after it.

        White space after the message counts as part of it.
        """
        ends = [end for message in self.positions if (end := message.end) is not None]
        if not ends:
            return self._sinks_end
        rest = self.text[max(ends) :].decode("utf-8", "replace")
        return max(ends) + len(rest[: len(rest) - len(rest.lstrip())].encode())

    @property
    def _sinks_end(self) -> int:
        sinks = self.record.token_ends[: min(EDIT_SINK_TOKENS, self.record.tokens_count)]
        return max(sinks, default=0)

    def _tail_areas(self) -> Iterator[tuple[int, int]]:
        """Yield the text after the known messages, without the openings of messages.

        Yields nothing if a message of unknown position may be in it, since clients resend it.
        """
        unknown = takewhile(lambda position: position.at is None, reversed(self.positions))
        if any(map(_is_somewhere, unknown)):
            return
        tail, parts = self._tail, list(self._parts())
        openings = sorted(self._openings(parts), key=len, reverse=True)
        for start, end in parts:
            if end <= tail:
                continue
            begun = next((o for o in openings if self.text[start:end].startswith(o)), b"")
            first = max(tail, start + len(begun))
            if first < end:
                yield first, end

    def _parts(self) -> Iterator[tuple[int, int]]:
        """Yield the parts of the text between special tokens."""
        ids, ends, start = self.record.token_ids, self.record.token_ends, 0
        for at, token in enumerate(ids):
            if token in self.marks:
                before = ends[at - 1] if at else 0
                if start < before:
                    yield start, before
                start = ends[at]
        if start < len(self.text):
            yield start, len(self.text)

    def _openings(self, parts: Sequence[tuple[int, int]]) -> set[bytes]:
        """Return the texts with which the template opens messages and the last answer."""
        starts = [position.start for position in self.positions if position.start is not None]
        openings = set()
        for start, end in parts:
            if end > self._tail:
                break
            at = bisect_left(starts, start)
            openings.add(self.text[start : min([end, *starts[at : at + 1]])])
        opened, prompt = (
            self.record.token_ends[count - 1] if count else 0
            for count in (
                self.record.provenance.marks.conversation,
                self.record.prompt_tokens_count,
            )
        )
        if opened:
            openings |= {
                self.text[start : min(end, prompt)]
                for start, end in parts
                if opened <= start < prompt
            }
        return openings - {b""}

    def _bytes_of_tokens(self, wanted: WantedSpan, start: int, end: int) -> tuple[int, int]:
        record = self.record
        if not 0 <= start < end <= record.tokens_count:
            _refuse(wanted, "out_of_range", f"the agent's tokens are 0 to {record.tokens_count}")
        mark = next((at for at in range(start, end) if record.token_ids[at] in self.marks), None)
        if mark is not None:
            why = f"token {mark} is a special token of the template: end the span before it"
            _refuse(wanted, "span_cuts_template", why)
        low, high = (record.token_ends[start - 1] if start else 0), record.token_ends[end - 1]
        while low and self.text[low : low + 1] and self.text[low] & _CONTINUES == _LEADS:
            low -= 1
        while high < len(self.text) and self.text[high] & _CONTINUES == _LEADS:
            high += 1
        if low == high:
            _refuse(wanted, "out_of_range", "these tokens have no text")
        return low, high

    def _at(self, wanted: WantedSpan, start: int, end: int) -> Iterator[Directive]:
        """Make a directive for a part of the text, in one message or after all of them."""
        if start < self._sinks_end:
            why = f"the first {EDIT_SINK_TOKENS} tokens cannot be edited: all others attend to them"
            _refuse(wanted, "attention_sink", why)
        for number, position in enumerate(self.positions):
            if (
                position.start is None
                or position.end is None
                or position.end <= start
                or position.start >= end
            ):
                continue
            self._message(wanted, number)
            if position.is_edited:
                _refuse(wanted, "message_edited", _unknown_place_reason(number, position))
            if start < position.start or end > position.end:
                why = f"it reaches beyond message {number}, which is {self._tokens(position)}"
                _refuse(wanted, "span_cuts_template", why)
            first = position.lead_chars + len(
                self.text[position.start : start].decode("utf-8", "replace")
            )
            count = len(self.text[start:end].decode("utf-8", "replace"))
            span = (first, first + count)
            yield self._directive(
                wanted, wanted.replacement or "", number, span, (start, end), count
            )
            return
        text = wanted.text or self.text[start:end].decode("utf-8", "replace").strip()
        count = len(self.text[start:end].decode("utf-8", "replace"))
        numbers = self._beside.numbers(start, end, len(text)) if text else []
        for number in numbers if wanted.first is None else {*numbers} & {wanted.first}:
            directive = self._directive(
                wanted, wanted.replacement or "", number, None, (start, end), count
            )
            yield replace(directive, besides_text=hash_text(text))
        if numbers:
            return
        if not any(a <= start and end <= b for a, b in self._tail_areas()):
            why = "it is outside the known messages: text of the template cannot be edited"
            _refuse(wanted, "span_cuts_template", why)
        yield self._directive(wanted, wanted.replacement or "", None, None, (start, end), count)

    def _tokens(self, position: MessagePosition) -> str:
        return "tokens {} to {}".format(*tokens_of(self.record, position))

    def _directive(
        self,
        wanted: WantedSpan,
        replacement: str | None,
        number: int | None,
        span: tuple[int, int] | None,
        at: tuple[int, int] | None,
        chars: int,
    ) -> Directive:
        was = self.text[slice(*at)] if at else None
        out = dropped_text(self.salt, (was or b"").decode("utf-8", "replace")) if was else None
        known = MessagePositions(self.positions)
        return Directive(
            wanted.operation,
            wanted.mode,
            replacement,
            message_digest=self.positions[number].digest if number is not None else None,
            made_s=wanted.made_s,
            nth=known.nth(number) if number is not None else None,
            span=span,
            at=at if was else None,
            was=text_digest(was) if was else None,
            dropped=out if out is not None and out.chars == chars else None,
            made_by=wanted.made_by,
        )


def tokens_of(record: Manifest, position: MessagePosition) -> tuple[int, int]:
    """Return the range of tokens with a message's text; empty if its position is unknown."""
    if position.start is None or position.end is None:
        return 0, 0
    start = bisect_right(record.token_ends, position.start)
    end = bisect_right(record.token_ends, position.end)
    return start, max(start, end)


def _places(
    text: bytes, sought: bytes, area: tuple[int, int], step: int
) -> Iterator[tuple[int, int]]:
    start, end = area
    at = text.find(sought, start, end)
    while at >= 0:
        yield at, at + len(sought)
        at = text.find(sought, at + step, end)


def _is_somewhere(position: MessagePosition) -> bool:
    return bool(position.chars) and not position.is_edited


def _unknown_place_reason(number: int, position: MessagePosition) -> str:
    if position.is_edited:
        return f"message {number} reads otherwise already: name characters of what its client sends"
    return f"the template shows message {number} otherwise than it was sent: name its characters"


def _refuse_system(wanted: WantedSpan) -> NoReturn:
    _refuse(wanted, "system_protected", "system messages cannot be edited")


def _refuse(wanted: WantedSpan, code: str, why: str) -> NoReturn:
    message = f"Invalid '{wanted.param}': {why}."
    raise RejectedError(message, code=code, param=wanted.param)
