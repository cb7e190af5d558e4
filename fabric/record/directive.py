"""Lasting edits of what an agent is told: messages that read otherwise, whoever sends them again.

A client goes on sending its whole history; what a directive concerns is replaced in it before the
model's template sees it. Where nothing is sent again (`generate`), it is replaced once in the text
that the agent remembers. So an operator, a policy or the agent itself edits a memory once, and the
client need not know.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import itemgetter
from typing import TypeAlias

from fabric.codec import left_out
from fabric.edit_mode import EditMode
from fabric.ids import OperationId
from fabric.limits import DIRECTED_ID_CHARS_MAX, DIRECTIVE_BYTES_MAX, UNDONE_SHOWN_MAX
from fabric.record.bounds import is_wall_time
from fabric.record.edited_head import dropped_digest
from fabric.record.said import DIGEST_BYTES, Spoken, said_digest
from fabric.turn.messages import Message, MessageRole


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a directive takes out: how much, and by what it is known again."""

    chars: int
    digest: str  # keyed


@dataclass(frozen=True, slots=True)
class Directive:
    """A message, or some of its characters, and what it says instead."""

    operation: OperationId  # several of one operation are made, and undone, together
    mode: EditMode
    replacement: str | None = field(repr=False)  # None: the message is left out
    result_of: str | None = None
    said: bytes | None = None  # digest of role and text
    made_s: float = 0.0
    is_applied: bool = False  # the agent's memory is what it is with it
    # Which of the messages that say so, from 0; None: each of them.
    nth: int | None = field(default=None, metadata=left_out())
    # Characters of the message; None: all of it.
    span: tuple[int, int] | None = field(default=None, metadata=left_out())
    # Bytes of the record's text, and their digest, for who is not sent the message again.
    at: tuple[int, int] | None = field(default=None, metadata=left_out())
    was: bytes | None = field(default=None, metadata=left_out())
    dropped: Dropped | None = field(default=None, metadata=left_out())
    made_by: str | None = field(default=None, metadata=left_out())
    undone_s: float | None = field(default=None, metadata=left_out())  # kept to be told of only

    @property
    def is_live(self) -> bool:
        """Say whether it holds."""
        return self.undone_s is None

    @property
    def is_span(self) -> bool:
        """Say whether it was placed in a record, by number, text or tokens."""
        return self.nth is not None or self.at is not None

    def problem(self) -> str | None:
        """Say why it cannot be one; None if it can."""
        if (self.result_of is not None) + (self.said is not None) != 1 and self.at is None:
            return "a directive names no message, or two"
        if len(self.result_of or "") > DIRECTED_ID_CHARS_MAX:
            return "a directive's call has too long an id"
        if {len(each) for each in (self.said, self.was) if each is not None} - {DIGEST_BYTES}:
            return "a directive names a text by no digest"
        if (self.at is None) != (self.was is None) or (self.nth or 0) < 0:
            return "a directive names no place"
        if any(not 0 <= start <= end for start, end in (self.span or (0, 0), self.at or (0, 0))):
            return "a directive is of no characters"
        text = (self.replacement or "").encode("utf-8", "surrogatepass")
        is_timed = is_wall_time(self.made_s) and is_wall_time(self.undone_s or 0.0)
        if len(text) > DIRECTIVE_BYTES_MAX or not is_timed:
            return "a directive is over its limits"
        return None


def text_digest(text: bytes) -> bytes:
    """Return by what a text is known again within the record that has it."""
    return blake2b(text, digest_size=DIGEST_BYTES, person=b"mf-was").digest()


def dropped(salt: bytes, text: str) -> Dropped:
    """Describe a text that is taken out, under a tenant's salt."""
    spelled = text.encode("utf-8", "surrogatepass")
    return Dropped(len(text), dropped_digest(salt, spelled))


def live(directives: Iterable[Directive] | None) -> tuple[Directive, ...]:
    """Return those that hold."""
    return tuple(each for each in directives or () if each.is_live)


def undone(directives: Iterable[Directive] | None) -> tuple[Directive, ...]:
    """Return those that were taken back, the newest last."""
    return tuple(each for each in directives or () if not each.is_live)[-UNDONE_SHOWN_MAX:]


def is_to_forget(directives: Iterable[Directive]) -> bool:
    """Return whether memory still knows what some of these have it forget."""
    return any(each.mode is EditMode.FORGET and not each.is_applied for each in directives)


_Numbered: TypeAlias = tuple[int, Directive]  # in the order in which they were made


@dataclass(frozen=True, slots=True)
class DirectedMessages:
    """A conversation as directives have it, and which of these concerned any of it."""

    messages: tuple[Message, ...]
    matched: tuple[Directive, ...]
    spoken: tuple[Spoken, ...]  # one for each message that was sent


def directed(
    messages: Sequence[Message], directives: Sequence[Directive], salt: bytes = b""
) -> DirectedMessages:
    """Replace what directives concern; of two for a whole message the newer one counts."""
    results: dict[str, list[_Numbered]] = {}
    digests: dict[bytes, list[_Numbered]] = {}
    for number, each in enumerate(live(directives)):
        if each.result_of is not None:
            results.setdefault(each.result_of, []).append((number, each))
        elif each.said is not None:
            digests.setdefault(each.said, []).append((number, each))
    made: list[Message] = []
    spoken: list[Spoken] = []
    matched: dict[int, Directive] = {}
    heard: Counter[bytes] = Counter()
    for message in messages:
        digest = said_digest(message)
        nth, heard[digest] = heard[digest], heard[digest] + 1
        found = _concerned(message, results, digests.get(digest, ()), nth)
        now = _edited(message, found)
        matched |= {id(each): _told(each, message, salt) for each in found}
        made += now
        text = "".join(now[0].texts) if now else None
        chars = sum(map(len, message.texts))
        spoken.append(Spoken(message.role, digest, chars, text, is_edited=bool(found)))
    return DirectedMessages(tuple(made), tuple(matched.values()), tuple(spoken))


def _concerned(
    message: Message, results: Mapping[str, list[_Numbered]], said: Iterable[_Numbered], nth: int
) -> list[Directive]:
    """List what is to be done to a message: all of it is replaced once, or spans of it are."""
    if message.role is MessageRole.SYSTEM:  # what the system says is never edited
        return []
    told = results.get(message.result_of, []) if message.result_of is not None else []
    placed = (each for each in said if each[1].nth in {None, nth})
    found = [each for _, each in sorted([*told, *placed], key=itemgetter(0))]
    whole = [each for each in found if each.span is None]
    return whole[-1:] or found


def _told(directive: Directive, message: Message, salt: bytes) -> Directive:
    """Note what one takes out of whom it was not known before that it concerns."""
    if directive.dropped is not None:
        return directive
    return replace(directive, dropped=dropped(salt, "".join(message.texts)))


def _edited(message: Message, found: Sequence[Directive]) -> tuple[Message, ...]:
    if not found:
        return (message,)
    if found[0].span is None:
        return _replaced(message, found[0].replacement)
    text = "".join(message.texts)
    for each in sorted(found, key=lambda each: each.span or (0, 0), reverse=True):
        start, end = each.span or (0, 0)
        text = text[:start] + (each.replacement or "") + text[end:]
    return (replace(message, texts=(text,)),)


def _replaced(message: Message, text: str | None) -> tuple[Message, ...]:
    # Calls and their results go together: neither can be left out alone.
    if text is None and not message.uses and message.result_of is None:
        return ()
    return (replace(message, texts=(text or "",), reasoning=None),)


def texts_bytes(directives: Iterable[Directive]) -> int:
    """Return how long the texts are that stand in the place of messages."""
    return sum(len((d.replacement or "").encode("utf-8", "surrogatepass")) for d in directives)


def applied(
    directives: Sequence[Directive], matched: Sequence[Directive]
) -> tuple[Directive, ...] | None:
    """Note which directives an agent's memory reflects by now; None for no directives."""
    known = {_bare(each): each.dropped for each in matched}
    found = (
        replace(each, is_applied=True, dropped=known[_bare(each)]) if _bare(each) in known else each
        for each in directives
    )
    return tuple(found) or None


def _bare(directive: Directive) -> Directive:
    return replace(directive, is_applied=False, dropped=None)
