"""Forms of conversations, which identify an agent even if its client rewrites its history.

    sent before   system 09:41 | question        | call | result … | answer
    sent now      system 09:42 | question        | call | [elided] | answer | next question
                  ^ clock        ^ or a reminder          ^ placeholder

A form is a chained hash of all messages, whose passing texts are left out, whose answers are whole,
and of whose results there is only the place. Passing texts are the clocks, dates and reminders that
clients rewrite for each turn; the model still reads them. Results are compared one by one: each is
the same or a placeholder. A conversation continues a form only if it has all of its messages, the
last answer included: a first question alone is no evidence.
"""

import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128_intdigest

from fabric.errors import CorruptDataError
from fabric.limits import ELIDED_CHARS_MAX, MESSAGES_MAX, PASSING_TEXTS_KNOWN_MAX
from fabric.turn.messages import Message, MessageRole, spelled_arguments

_DATE: Final = (
    r"(?:today(?:'s|\u2019s)? (?:date\b|is\b)|(?:the )?current (?:date|day|time)\b"
    r"|date(?: and time)?:)"
)
DATE_LINE: Final = re.compile(
    rf"^[ \t]*(?:[-*>#]+ )?\**{_DATE}[^\n]{{0,160}}$\n?", re.IGNORECASE | re.MULTILINE
)

# Blocks that coding agents put into messages and take out again. A block ends with its own name.
_REMINDER: Final = re.compile(
    r"<(system[-_]reminder|reminder|environment_(?:details|context))>", re.IGNORECASE
)

# Each pattern begins with a small set of characters, which makes the search fast.
_MONTH: Final = (
    r"[ADFJMNOS](?:an|anuary|eb|ebruary|ar|arch|pr|pril|ay|un|une|ul|uly|ug|ugust|ep|ept|eptember"
    r"|ct|ctober|ov|ovember|ec|ecember)\b\.?"
)
_YEAR: Final = r"(?:,? \d{4}\b)?"
_ZONE: Final = r"(?: ?(?:Z\b|UTC\b|GMT\b|[A-Z]{1,4}T\b|[+-]\d{2}:?\d{2}\b)){0,2}"
_TIME: Final = rf":\d{{2}}(?::\d{{2}}(?:[.,]\d{{1,9}})?)?(?: ?[AaPp]\.?[Mm]\b)?{_ZONE}"
_NUMBERS: Final = re.compile(
    rf"[0-9](?:\d?{_TIME}(?: (?:19|20)\d{{2}}\b)?"
    rf"|\d{{3}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:T\d{{1,2}}{_TIME})?"
    r"|\d?[-/.]\d{1,2}[-/.]\d{4}\b"
    rf"|\d?(?:st|nd|rd|th)?\b\.? {_MONTH}{_YEAR}"
    r"|(?<=\b1)[5-9]\d{8}(?:\d{3})?(?:\.\d{1,9})?\b)"  # seconds or milliseconds since 1970
)
_DATES: Final = re.compile(rf"{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?\b{_YEAR}")
_WEEKDAYS: Final = re.compile(
    r"[FMSTW](?:on|ue|ues|ed|ednes|hu|hurs|ri|at|atur|un)"
    rf"(?:day\b,?|\b(?=,? (?:{_MONTH}|\d)))"
)


def without_reminders(text: str) -> str:
    """Return a text without reminders, its white space in one spelling."""
    kept, done, unclosed = list[str](), 0, set[str]()
    for opening in _REMINDER.finditer(text) if "<" in text else ():
        name = opening[1]
        if opening.start() < done or name in unclosed:
            continue
        end = text.find(f"</{name}>", opening.end())
        if end < 0:
            unclosed.add(name)
            continue
        kept.append(text[done : opening.start()])
        done = end + len(f"</{name}>")
    return " ".join(" ".join([*kept, text[done:]]).split())


def without_passing_texts(text: str, *, drops_lines: bool) -> str:
    """Return a text without reminders and clocks; with `drops_lines`, without all lines of a date.

    A user may ask for a date in one line, which must stay.
    """
    if drops_lines:
        text = DATE_LINE.sub("", text)
    text = without_reminders(text)
    for passing in (_WEEKDAYS, _DATES, _NUMBERS):  # the first two look at numbers
        text = passing.sub(" ", text)
    return " ".join(text.split())


_HEAD: Final = struct.Struct("<Q")
_ROW: Final = struct.Struct("<IQ")
_CHARS_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class ResultForm:
    """Length of a tool's result in characters, and its hash."""

    chars: int
    digest: int

    def is_like(self, other: "ResultForm") -> bool:
        """Return whether both are the same, or one is a placeholder of the other."""
        if self == other:
            return True
        short, long = sorted((self.chars, other.chars))
        return short <= ELIDED_CHARS_MAX and 2 * short < long


@dataclass(frozen=True, slots=True)
class ConversationForm:
    """Form of a conversation up to an answer, which is part of it."""

    digest: int
    results: tuple[ResultForm, ...] = ()

    def to_wire(self) -> bytes:
        """Pack the hash, and 12 bytes for each result."""
        rows = (_ROW.pack(result.chars, result.digest) for result in self.results)
        return _HEAD.pack(self.digest) + b"".join(rows)

    @classmethod
    def from_wire(cls, raw: bytes) -> "ConversationForm":
        """Unpack; raise CorruptDataError for bytes that `to_wire` did not write."""
        count, rest = divmod(len(raw) - _HEAD.size, _ROW.size)
        if rest or not 0 <= count <= MESSAGES_MAX:
            message = "a conversation's form is cut short, or too long"
            raise CorruptDataError(message)
        rows = _ROW.iter_unpack(raw[_HEAD.size :])
        (digest,) = _HEAD.unpack_from(raw)
        return cls(digest, tuple(ResultForm(*row) for row in rows))


@dataclass(frozen=True, slots=True)
class FormChain:
    """Forms with which a request begins, and what continues its own."""

    whole: ConversationForm  # of all its messages
    # For each answer: the hash of all messages before it, and with it.
    before: tuple[int, ...] = ()
    with_answer: tuple[int, ...] = ()
    _chain: xxh3_64 = field(default_factory=xxh3_64, compare=False, repr=False)

    def beginnings(self) -> Iterable[int]:
        """Yield the hashes of all beginnings that end with an answer, the longest first."""
        return reversed(self.with_answer)

    def turns(self) -> Iterator[int]:
        """Yield the hashes of all turns with and without their answers, the longest first."""
        for without, whole in zip(reversed(self.before), reversed(self.with_answer), strict=True):
            yield whole
            yield without

    def continues(self, form: ConversationForm) -> bool:
        """Return whether the request has all messages of a form."""
        if form.digest not in self.with_answer or len(form.results) > len(self.whole.results):
            return False
        pairs = zip(form.results, self.whole.results, strict=False)
        return all(known.is_like(sent) for known, sent in pairs)

    def form_with(self, answer: Message) -> ConversationForm:
        """Return the form of the request with its answer."""
        chain = self._chain.copy()
        chain.update(_spell_message(answer))
        return ConversationForm(chain.intdigest(), self.whole.results)


def form_chain(messages: Sequence[Message], tools: Sequence[Any] | None) -> FormChain:
    """Return the forms of a conversation; takes time by the byte of its new messages."""
    chain = xxh3_64(seed=3)
    if tools:
        # Some clients have the date in a tool's description.
        spelled_tools = json.dumps(tools, ensure_ascii=False, separators=(",", ":"), default=str)
        chain.update(_HEAD.pack(_hash_lasting_text(spelled_tools, is_system=False)))
    before: list[int] = []
    ends: list[int] = []
    results: list[ResultForm] = []
    for message in messages:
        if message.role is MessageRole.ASSISTANT:
            before.append(chain.intdigest())
            chain.update(_spell_message(message))
            ends.append(chain.intdigest())
            continue
        if message.role is MessageRole.TOOL:
            results.append(_result(message))
        spelled = _spell_message(message)
        if spelled:
            chain.update(spelled)
    return FormChain(
        ConversationForm(chain.intdigest(), tuple(results)), tuple(before), tuple(ends), chain
    )


def _spell_message(message: Message) -> bytes:
    """Encode the lasting part of a message; nothing if it has passing texts only."""
    if message.role is MessageRole.TOOL:
        return b"tool\n"
    text = "".join(message.texts)
    if message.role is MessageRole.ASSISTANT:
        uses = [(use.name, spelled_arguments(use.arguments)) for use in message.uses]
        spelled = ["assistant", text.strip(), message.name, uses]
        return json.dumps(spelled).encode() + b"\n"
    digest = _hash_lasting_text(text, is_system=message.role is MessageRole.SYSTEM)
    if not digest:
        return b""
    return json.dumps([message.role.value, message.name, digest]).encode() + b"\n"


def _result(message: Message) -> ResultForm:
    text = without_reminders("".join(message.texts))
    return ResultForm(min(len(text), _CHARS_MAX), xxh3_64_intdigest(_encode_text(text)))


# Hashes of recent texts without their passing parts, since each turn repeats all earlier texts.
_known: dict[int, int] = {}


def _hash_lasting_text(text: str, *, is_system: bool) -> int:
    """Return a hash of a text without its passing parts; 0 if nothing is left."""
    raw = _encode_text(text)
    name = xxh3_128_intdigest(raw, seed=is_system)
    digest = _known.get(name)
    if digest is None:
        lasting_text = without_passing_texts(text, drops_lines=is_system)
        digest = xxh3_64_intdigest(_encode_text(lasting_text)) if lasting_text else 0
        if len(_known) >= PASSING_TEXTS_KNOWN_MAX:
            _known.clear()
        _known[name] = digest
    return digest


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
