"""Edited head of a record: the tokens up to the last edit of its cache.

    tokens   0 ....... exact ............ head ........ n
             [ block )[ parts of blocks, moved )[ 256 )[ tail )

After the head, blocks of 256 tokens start again. Tokens before `exact_tokens` were computed as if
nothing had been edited.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Final

from fabric.codec import left_out
from fabric.ids import BLOCK_HASH_BYTES, BlockHash
from fabric.limits import AGENT_TOKENS_MAX, BLOCK_TOKENS, EDITS_NOTED_MAX
from fabric.record.bounds import is_wall_time
from fabric.record.lenders import ANY_LENDER, Lender, are_too_many
from fabric.record.piece_table import PieceTable
from fabric.u32s import U32s

_DIGEST_BYTES: Final = 16
_DIGEST_CHARS: Final = 2 * _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Origin:
    """Inputs of a block's name; a cache may hold only a part of the block."""

    parent: BlockHash
    tokens: U32s = field(repr=False)


@dataclass(frozen=True, slots=True)
class EditNote:
    """Description of one edit: sizes and a digest, but no removed text."""

    made_s: float
    start: int  # token position at that time
    dropped_tokens: int
    inserted_tokens: int
    moved_tokens: int  # tokens after the edit whose cache was kept
    dropped_digest: str  # keyed digest of the removed tokens
    is_borrowed: bool | None = field(
        default=None, metadata=left_out()
    )  # whether the inserted tokens come from another context

    @property
    def is_sound(self) -> bool:
        """Return whether all values are in range, so that clients can be shown them as JSON."""
        counts = (self.start, self.dropped_tokens, self.inserted_tokens, self.moved_tokens)
        is_in_range = all(0 <= count <= AGENT_TOKENS_MAX for count in counts)
        return (
            is_in_range and is_wall_time(self.made_s) and len(self.dropped_digest) <= _DIGEST_CHARS
        )


@dataclass(frozen=True, slots=True)
class EditedHead:
    """Tokens up to the last edit: the origins of their blocks, and notes of the edits."""

    tokens_count: int
    exact_tokens: int
    origins: tuple[Origin, ...]  # of the head's pieces, in order
    notes: tuple[EditNote, ...] = ()  # the newest, oldest first
    lenders: tuple[Lender, ...] | None = field(default=None, metadata=left_out())

    @property
    def known_lenders(self) -> tuple[Lender, ...]:
        """Return the lenders of its rows; ANY_LENDER if an earlier version did not note them."""
        if self.lenders is not None:
            return self.lenders
        may_borrow = len(self.notes) == EDITS_NOTED_MAX  # an older note may have been dropped
        has_borrowed = may_borrow or any(note.is_borrowed for note in self.notes)
        return (ANY_LENDER,) if has_borrowed else ()

    def problem(self, pieces: PieceTable, tokens: U32s) -> str | None:
        """Return why this is not a valid head of `pieces` with `tokens`; None if it is."""
        if not max(1, self.exact_tokens) <= self.tokens_count <= pieces.tokens_count:
            return "the length of its edited head is out of range"
        if self.exact_tokens < 0:
            return "its edited head has a negative number of exact tokens"
        if len(self.origins) > len(pieces) or len(self.notes) > EDITS_NOTED_MAX:
            return "its edited head has too many pieces or edit notes"
        if not all(note.is_sound for note in self.notes):
            return "a number in an edit note is out of range"
        lenders = self.lenders or ()
        if are_too_many(lenders) or not all(lender.is_sound for lender in lenders):
            return "it has too many lenders, or an invalid one"
        return self._pieces_problem(pieces, tokens)

    def _pieces_problem(self, pieces: PieceTable, tokens: U32s) -> str | None:
        head = pieces.items[: len(self.origins)]
        ends = list(accumulate(piece.tokens_count for piece in head))
        if not ends or ends[-1] != self.tokens_count:
            return "the pieces of its edited head do not add up to its length"
        for piece, end, origin in zip(head, ends, self.origins, strict=True):
            start = end - piece.tokens_count
            if len(origin.parent) != BLOCK_HASH_BYTES or len(origin.tokens) > BLOCK_TOKENS:
                return "a block's origin is malformed"
            if len(origin.tokens) != piece.block.tokens_count:
                return "a block's origin differs from it in length"
            if piece.delta and start < self.exact_tokens:
                return "a piece before the first edit has moved"
            if origin.tokens[piece.start : piece.end] != tokens[start:end]:
                return "a piece's tokens differ from the record's"
        return None

    def within(self, pieces: PieceTable) -> "EditedHead | None":
        """Return the head of a record truncated to `pieces`."""
        count = pieces.tokens_count
        if count >= self.tokens_count:
            return self
        if count <= self.exact_tokens:
            # Parts of blocks are left: their names follow from their origins only.
            return None if not pieces.is_edited else self._cut(pieces, count, count)
        return self._cut(pieces, count, self.exact_tokens)

    def _cut(self, pieces: PieceTable, tokens_count: int, exact_tokens: int) -> "EditedHead | None":
        if not tokens_count:
            return None
        origins = self.origins[: len(pieces)]
        return EditedHead(tokens_count, exact_tokens, origins, self.notes, self.lenders)


def dropped_digest(salt: bytes, dropped: bytes) -> str:
    """Return a keyed digest of removed tokens."""
    return blake2b(dropped, digest_size=_DIGEST_BYTES, key=salt, person=b"mf-dropped").hexdigest()


def newest_notes(notes: Sequence[EditNote], more: Sequence[EditNote]) -> tuple[EditNote, ...]:
    """Return the newest notes of both, oldest first."""
    return (*notes, *more)[-EDITS_NOTED_MAX:]
