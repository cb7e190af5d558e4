"""Layout of a cache patched with parts of other agents' caches.

    own      [ block 0 )( hole          )[ rest )( hole                    )
    others             [ part of theirs )         ( hole )[ part of theirs )

A borrowed part of a block is stored again as the borrower's: the rest of the block is another
agent's text, which is removed when that agent is erased.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fabric.kvcache.arrangement import Move
from fabric.record.edited_head import EditNote, newest_notes
from fabric.record.layout import Held, Hole, Layout, Part, merge_parts
from fabric.record.lenders import Lender, merge_lenders


@dataclass(frozen=True, slots=True)
class Patch:
    """Tokens of one cache that are moved into another."""

    source: Layout
    move: Move

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of these tokens, moved to their new place."""
        by = self.move.new_start - self.move.start
        parts = self.source.parts_of(self.move.start, self.move.end, by)
        return tuple(map(copied_part, parts))


def copied_part(part: Part) -> Part:
    """Return another agent's part, to be stored again unless it is the whole block."""
    if isinstance(part, Held) and part.tokens_count < part.piece.block.tokens_count:
        return replace(part, is_resaved=True)
    return part


def with_patches(
    base: Layout,
    patches: Sequence[Patch],
    notes: Sequence[EditNote] = (),
    lenders: Sequence[Lender] = (),
) -> Layout:
    """Return a layout with patches in its holes and after it, and holes in between."""
    placed: list[tuple[int, tuple[Part, ...]]] = [
        (start, (part,)) for start, _, part in base.placed() if isinstance(part, Held)
    ]
    placed += [(patch.move.new_start, patch.parts) for patch in patches]
    parts: list[Part] = []
    end = 0
    for start, piece_parts in sorted(placed, key=lambda each: each[0]):
        assert start >= end, "patches lie in holes"
        parts += [Hole(start - end)] if start > end else []
        parts += piece_parts
        end = start + _tokens(piece_parts)
    exact = base.exact_tokens if base.head_tokens else base.arrangement.tokens_count
    notes = newest_notes(base.notes, notes)
    lenders = merge_lenders(base.lenders, lenders)
    return Layout(tuple(merge_parts(parts)), end, exact, notes, lenders)


def _tokens(parts: Iterable[Part]) -> int:
    return sum(part.tokens_count for part in parts)
