"""Piece table: a KV cache as pieces of immutable blocks, as a record stores it.

    position   0 ........ 256 ........ 512 .... n
    computed   [ block 0   )[ block 1   )[ tail  )   whole blocks, each in its own place
    edited     [ block 0 )[ new )[ 1    )[ tail  )   the rest is `delta` away from its own place

An edit moves pieces and never bytes: every token of a table knows the place at which it was
computed, and no operation changes that.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq

from fabric.errors import require
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import AGENT_TOKENS_MAX, PIECES_MAX
from fabric.u32s import U32s


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start:end` of one block, moved by `delta` positions from where they were computed."""

    block: BlockRef
    start: int
    end: int
    delta: int = 0

    @property
    def tokens_count(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """Return whether this is a whole block where it was computed."""
        return (self.start, self.end, self.delta) == (0, self.block.tokens_count, 0)

    def continues(self, before: "Piece") -> bool:
        """Return whether this and `before` are adjacent parts of one block."""
        return (self.block, self.start, self.delta) == (before.block, before.end, before.delta)

    def moved(self, by: int) -> "Piece":
        """Return the piece moved by `by` positions."""
        return replace(self, delta=self.delta + by) if by else self


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Consecutive pieces from position 0 on; raises CorruptDataError for invalid ones."""

    items: tuple[Piece, ...] = ()
    _ends: U32s = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check every piece; note where each ends."""
        require(len(self.items) <= PIECES_MAX, "a cache of too many pieces")
        end, ends = 0, []
        for piece in self.items:
            size = piece.block.tokens_count
            require(0 <= piece.start < piece.end <= size, "a piece lies outside its block")
            block_start = end - piece.start - piece.delta  # where it was computed
            is_in_place = 0 <= block_start <= AGENT_TOKENS_MAX - size
            require(is_in_place, "a piece was computed where no token is")
            end += piece.tokens_count
            ends.append(end)
        require(end <= AGENT_TOKENS_MAX, "pieces of too many tokens")
        object.__setattr__(self, "_ends", U32s(ends))

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.items)

    def __getitem__(self, index: int) -> Piece:
        return self.items[index]

    def to_wire(self) -> tuple[Piece, ...]:
        """Return the pieces for a record's bytes."""
        return self.items

    @classmethod
    def from_wire(cls, items: tuple[Piece, ...]) -> "PieceTable":
        """Read what `to_wire` wrote; raise CorruptDataError for an invalid table."""
        return cls(items)

    # --- lookup ------------------------------------------------------------------------------

    @property
    def tokens_count(self) -> int:
        """Tokens in all pieces."""
        return self._ends[-1] if self.items else 0

    @property
    def blocks(self) -> list[BlockRef]:
        """The block of every piece, in order, repeated as the pieces repeat it."""
        return [piece.block for piece in self.items]

    @property
    def is_edited(self) -> bool:
        """Return whether any piece is a part of a block, or was moved."""
        return not all(piece.is_whole for piece in self.items)

    def unedited(self, tokens_max: int) -> "PieceTable":
        """Return the leading whole blocks in their own places that end within `tokens_max`."""
        count = 0
        for piece, end in zip(self.items, self._ends, strict=True):
            if not piece.is_whole or end > tokens_max:
                break
            count += 1
        return self if count == len(self.items) else PieceTable(self.items[:count])

    def tokens_before(self, unusable: AbstractSet[BlockRef]) -> int:
        """Count the tokens before the first piece of an unusable block."""
        return self._tokens_while(piece.block not in unusable for piece in self.items)

    def tokens_in_common(self, other: "PieceTable") -> int:
        """Count the leading tokens that lie in the same pieces of both."""
        return self._tokens_while(map(eq, self.items, other.items))

    def _tokens_while(self, holds: Iterable[bool]) -> int:
        count = sum(1 for _ in takewhile(bool, holds))
        return self._ends[count - 1] if count else 0

    # --- other tables ------------------------------------------------------------------------

    def append(self, blocks: Iterable[BlockRef]) -> "PieceTable":
        """Return the table with whole blocks appended."""
        return PieceTable((*self.items, *(Piece(ref, 0, ref.tokens_count) for ref in blocks)))

    def slice(self, start: int, end: int) -> "PieceTable":
        """Return a table of the tokens `start:end`, which starts at position 0."""
        return PieceTable(tuple(part.moved(-start) for part in self._parts(start, end)))

    def _parts(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces of the tokens `start:end`, with their deltas unchanged."""
        assert 0 <= start <= end <= self.tokens_count, "the range lies within the tokens"
        for piece, piece_end in zip(self.items, self._ends, strict=True):
            block_start = piece_end - piece.end  # where its block's first token would be
            part = max(piece.start, start - block_start), min(piece.end, end - block_start)
            if part == (piece.start, piece.end):
                yield piece
            elif part[0] < part[1]:
                yield Piece(piece.block, *part, piece.delta)
