"""Positions of the messages of an agent's last whole conversation in its record's text.

These hold no text. A digest identifies a message. Its position is known if the template copied its
text unchanged, between two marks that contain it only once.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Final

from fabric.errors import CorruptDataError
from fabric.limits import MESSAGE_GAP_BYTES_MAX, MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole, spelled_arguments

DIGEST_BYTES: Final = 16
_ROW: Final = struct.Struct("<BBH16sIII")
_NOWHERE: Final = (1 << 32) - 1
_LEAD_MAX: Final = (1 << 16) - 1
_ROLES: Final = (MessageRole.SYSTEM, MessageRole.USER, MessageRole.ASSISTANT, MessageRole.TOOL)


def message_digest(message: Message) -> bytes:
    """Return the digest that identifies a message: of role, text, and calls without their ids."""
    spelled = f"{message.role.value}\0{''.join(message.texts)}".encode("utf-8", "surrogatepass")
    for use in message.uses:
        call = f"\0{use.name}\0{spelled_arguments(use.arguments)}"
        spelled += call.encode("utf-8", "surrogatepass")
    return blake2b(spelled, digest_size=DIGEST_BYTES, person=b"mf-said").digest()


@dataclass(frozen=True, slots=True)
class SentMessage:
    """Message of a client, and the text that the template gets instead of its own."""

    role: MessageRole
    digest: bytes
    chars: int
    text: str | None  # None: the message is left out
    is_edited: bool = False


@dataclass(frozen=True, slots=True)
class MessagePosition:
    """Position of one message in the record's text, in bytes."""

    role: MessageRole
    digest: bytes
    chars: int  # as its client sends it
    start: int | None = None  # None: unknown
    size_bytes: int = 0
    lead_chars: int = 0  # white space before it that the template left out
    is_edited: bool = False  # a directive changed it there

    @property
    def at(self) -> tuple[int, int] | None:
        """Start and end of the message in the record's text; None if unknown."""
        return None if self.start is None else (self.start, self.start + self.size_bytes)

    @property
    def end(self) -> int | None:
        """End of the message in the record's text."""
        return self.at[1] if self.at is not None else None


@dataclass(frozen=True, slots=True)
class MessagePositions:
    """Positions of all messages of a conversation, in order."""

    messages: tuple[MessagePosition, ...]

    def to_wire(self) -> bytes:
        """Pack each position into 32 bytes."""
        return b"".join(map(_pack_row, self.messages))

    @classmethod
    def from_wire(cls, raw: bytes) -> "MessagePositions":
        """Unpack; raise CorruptDataError for bytes that `to_wire` did not write."""
        count, rest = divmod(len(raw), _ROW.size)
        if rest or count > MESSAGES_MAX:
            message = "message positions are cut short, or too many"
            raise CorruptDataError(message)
        return cls(tuple(map(_unpack_row, _ROW.iter_unpack(raw))))

    def problem(self, text_bytes: int) -> str | None:
        """Return why the positions are invalid for a text of this size, or None."""
        done = 0
        for message in self.messages:
            if message.at is None:
                continue
            start, end = message.at
            if start < done or end > text_bytes:
                return "its messages are not in order"
            done = end
        return None

    def nth(self, number: int) -> int:
        """Count the earlier messages with the same digest."""
        digest = self.messages[number].digest
        return sum(message.digest == digest for message in islice(self.messages, number))

    def edited(self, edits: Sequence[tuple[int, int, int]]) -> "MessagePositions":
        """Return the positions after edits, each given as (start, end, new size) in bytes."""
        return MessagePositions(tuple(_edit_position(message, edits) for message in self.messages))

    def within(self, text_bytes: int) -> "MessagePositions":
        """Return the positions in the text truncated to `text_bytes` bytes."""
        cut = (
            m if m.end is None or m.end <= text_bytes else _without_place(m) for m in self.messages
        )
        return MessagePositions(tuple(cut))


def find_positions(
    sent: Iterable[SentMessage], text: bytes, marks: Sequence[tuple[int, int]]
) -> MessagePositions:
    """Find messages in a prompt's text; the template's marks are at `marks`."""
    return MessagePositions(tuple(_place_messages(sent, text, marks)))


def _place_messages(
    sent: Iterable[SentMessage], text: bytes, marks: Sequence[tuple[int, int]]
) -> Iterator[MessagePosition]:
    starts, ends = [start for start, _ in marks], [end for _, end in marks]
    placed_end = 0
    for message in sent:
        position = MessagePosition(
            message.role, message.digest, message.chars, is_edited=message.is_edited
        )
        shown = (message.text or "").strip()
        shown_bytes = shown.encode("utf-8", "replace")
        at = (
            text.find(
                shown_bytes, placed_end, placed_end + len(shown_bytes) + MESSAGE_GAP_BYTES_MAX
            )
            if shown_bytes
            else -1
        )
        lead = len(message.text or "") - len((message.text or "").lstrip())
        if at < 0 or lead > _LEAD_MAX:
            yield position
            continue
        following = bisect_left(starts, at)
        until = starts[following] if following < len(starts) else len(text)
        opened = bisect_right(ends, at)
        since = max(placed_end, ends[opened - 1] if opened else 0)
        is_alone = opened == following and at + len(shown_bytes) <= until
        if is_alone and text.count(shown_bytes, since, until) == 1:
            yield replace(position, start=at, size_bytes=len(shown_bytes), lead_chars=lead)
            placed_end = at + len(shown_bytes)
        else:
            yield position


def _edit_position(
    message: MessagePosition, edits: Sequence[tuple[int, int, int]]
) -> MessagePosition:
    if message.at is None:
        return message
    start, end = message.at
    before = sum(size - (b - a) for a, b, size in edits if b <= start)
    inside = [(a, b, size) for a, b, size in edits if start <= a and b <= end and b > start]
    if any(a < end and b > start for a, b, _ in edits) and not inside:
        return _without_place(message)
    grown = sum(size - (b - a) for a, b, size in inside)
    return replace(
        message,
        start=start + before,
        size_bytes=message.size_bytes + grown,
        is_edited=message.is_edited or bool(inside),
    )


def _without_place(message: MessagePosition) -> MessagePosition:
    return replace(message, start=None, size_bytes=0, lead_chars=0)


def _pack_row(message: MessagePosition) -> bytes:
    start = _NOWHERE if message.start is None else message.start
    return _ROW.pack(
        _ROLES.index(message.role),
        message.is_edited,
        message.lead_chars,
        message.digest,
        message.chars,
        start,
        message.size_bytes,
    )


def _unpack_row(row: tuple[int, int, int, bytes, int, int, int]) -> MessagePosition:
    role, edited_flag, lead_chars, digest, chars, start, size_bytes = row
    if role >= len(_ROLES) or edited_flag > 1:
        message = "the role or the edit flag of a message is out of range"
        raise CorruptDataError(message)
    place_at = None if start == _NOWHERE else start
    is_edited = bool(edited_flag)
    return MessagePosition(_ROLES[role], digest, chars, place_at, size_bytes, lead_chars, is_edited)
