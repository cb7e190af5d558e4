"""Directives: lasting edits of an agent's messages, applied each time a client sends them again.

A client sends its whole history with each request; the node replaces the parts that directives
match before it renders the template. An agent of `generate` sends no history: there the stored text
is edited once. So an operator, a policy or the agent itself can edit a memory without the client.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from fabric.codec import left_out, on_wire
from fabric.edit_mode import EditMode
from fabric.ids import OperationId
from fabric.limits import DIRECTED_ID_CHARS_MAX, DIRECTIVE_BYTES_MAX, UNDONE_SHOWN_MAX
from fabric.record.bounds import is_wall_time
from fabric.record.edited_head import dropped_digest
from fabric.record.hashed_text import HashedText
from fabric.record.message_parts import MessagePart
from fabric.record.message_positions import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Dropped:
    """Text that a directive removes: its size, and a digest to recognize it."""

    chars: int
    digest: str  # keyed


@dataclass(frozen=True, slots=True)
class Directive:
    """Edit of a message, or of some of its characters."""

    operation: OperationId  # directives of one operation are added and undone together
    mode: EditMode
    replacement: str | None = field(repr=False)  # None: the message is removed
    result_of: str | None = None
    message_digest: bytes | None = field(default=None, metadata=on_wire("said"))  # of role and text
    made_s: float = 0.0
    is_applied: bool = False  # the agent's cache reflects it
    # Number among the messages with this digest, from 0; None: all of them.
    nth: int | None = field(default=None, metadata=left_out())
    # Characters of the message; None: all of it.
    span: tuple[int, int] | None = field(default=None, metadata=left_out())
    # Bytes of the record's text, and their digest, for turns that do not send the message again.
    at: tuple[int, int] | None = field(default=None, metadata=left_out())
    was: bytes | None = field(default=None, metadata=left_out())
    dropped: Dropped | None = field(default=None, metadata=left_out())
    made_by: str | None = field(default=None, metadata=left_out())
    undone_s: float | None = field(default=None, metadata=left_out())  # kept for display only
    part: MessagePart | None = field(default=None, metadata=left_out())  # None: text, or all of it
    # Text in the message's thoughts and calls that is replaced there.
    besides_text: HashedText | None = field(
        default=None, metadata={**left_out(), **on_wire("sought")}
    )

    @property
    def is_live(self) -> bool:
        """Return whether the directive is in force."""
        return self.undone_s is None

    @property
    def is_whole(self) -> bool:
        """Return whether it replaces a whole message."""
        return self.span is None and self.part is None and self.besides_text is None

    @property
    def is_span(self) -> bool:
        """Return whether it edits a span of a record, given by number, text or tokens."""
        return self.nth is not None or self.at is not None

    def problem(self) -> str | None:
        """Return why the directive is invalid; None if it is valid."""
        if (self.result_of is not None) + (
            self.message_digest is not None
        ) != 1 and self.at is None:
            return "a directive must name exactly one message"
        if len(self.result_of or "") > DIRECTED_ID_CHARS_MAX:
            return f"a directive's call id must have at most {DIRECTED_ID_CHARS_MAX} characters"
        of_no_text = self.besides_text is not None and (
            self.message_digest is None or not self.besides_text.is_valid
        )
        if of_no_text or (self.part is not None and self.result_of is None):
            return "a directive for part of a message must name a text or a call"
        if {len(known) for known in (self.message_digest, self.was) if known is not None} - {
            DIGEST_BYTES
        }:
            return f"a directive's digests must have {DIGEST_BYTES} bytes"
        if (self.at is None) != (self.was is None) or (self.nth or 0) < 0:
            return "a directive's position is invalid"
        if any(not 0 <= start <= end for start, end in (self.span or (0, 0), self.at or (0, 0))):
            return "a directive's range is invalid"
        text = (self.replacement or "").encode("utf-8", "surrogatepass")
        is_timed = is_wall_time(self.made_s) and is_wall_time(self.undone_s or 0.0)
        if len(text) > DIRECTIVE_BYTES_MAX or not is_timed:
            return "a directive's replacement is too long, or its time is invalid"
        return None


def text_digest(text: bytes) -> bytes:
    """Return the digest that identifies a text within its record."""
    return blake2b(text, digest_size=DIGEST_BYTES, person=b"mf-was").digest()


def dropped_text(salt: bytes, text: str) -> Dropped:
    """Return the size and keyed digest of a removed text."""
    spelled = text.encode("utf-8", "surrogatepass")
    return Dropped(len(text), dropped_digest(salt, spelled))


def live_directives(directives: Iterable[Directive] | None) -> tuple[Directive, ...]:
    """Return the directives in force."""
    return tuple(directive for directive in directives or () if directive.is_live)


def undone_directives(directives: Iterable[Directive] | None) -> tuple[Directive, ...]:
    """Return the undone directives, the newest last."""
    undone = [directive for directive in directives or () if not directive.is_live]
    return tuple(undone[-UNDONE_SHOWN_MAX:])


def is_to_forget(directives: Iterable[Directive]) -> bool:
    """Return whether the cache still contains a text that a directive forgets."""
    return any(
        directive.mode is EditMode.FORGET and not directive.is_applied for directive in directives
    )


def texts_bytes(directives: Iterable[Directive]) -> int:
    """Return the length of all replacement texts."""
    return sum(len((d.replacement or "").encode("utf-8", "surrogatepass")) for d in directives)


def mark_applied(
    directives: Sequence[Directive], matched: Sequence[Directive]
) -> tuple[Directive, ...] | None:
    """Mark the matched directives as applied; return all, or None if there are none."""
    dropped_texts = {_strip_results(directive): directive.dropped for directive in matched}
    updated = (
        replace(directive, is_applied=True, dropped=dropped_texts[_strip_results(directive)])
        if _strip_results(directive) in dropped_texts
        else directive
        for directive in directives
    )
    return tuple(updated) or None


def _strip_results(directive: Directive) -> Directive:
    return replace(directive, is_applied=False, dropped=None)


def overlap(one: Directive, other: Directive) -> bool:
    """Return whether two directives edit the same part of a message or of a record."""
    if not (one.is_span and other.is_span):
        return False
    if one.nth is not None and (one.message_digest, one.nth) == (other.message_digest, other.nth):
        if one.besides_text is not None or other.besides_text is not None:
            if not (one.is_whole or other.is_whole):
                return one.besides_text == other.besides_text and _ranges_overlap(
                    one.at or (0, 0), other.at or (0, 0)
                )
            return True
        return one.span is None or other.span is None or _ranges_overlap(one.span, other.span)
    if one.is_applied or other.is_applied or one.at is None or other.at is None:
        return False
    return one.nth is None and other.nth is None and _ranges_overlap(one.at, other.at)


def _ranges_overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
