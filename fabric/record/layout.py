"""Layout of a cache: parts of stored blocks in token order, and holes to be computed.

    unedited [ block 0    )[ block 1    )[ tail )
    edited   [ block 0 )( hole )[ 1    )[ tail )      later rows moved by the size of the edit

A cache is restored, rearranged in memory, named and saved from its layout. Block names are not
checked when a layout is built but when a block is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Final, TypeAlias

from fabric.ids import BlockHash, Fingerprint
from fabric.kvcache.arrangement import UNEDITED_GRID, Arrangement, Move, Shift, WindowGrid
from fabric.kvcache.block_chain import BlockRef, BlockSpan, EditLineage, block_spans
from fabric.kvcache.hashing import LINEAGE_BYTES, ROOT_PARENT, block_hash, edited_parent
from fabric.limits import AGENT_TOKENS_MAX, BLOCK_TOKENS, EDITS_NOTED_MAX
from fabric.record.edited_head import EditedHead, EditNote, Origin, newest_notes
from fabric.record.lenders import Lender
from fabric.record.manifest import Manifest, Placed
from fabric.record.piece_table import Piece, PieceTable
from fabric.u32s import U32s


@dataclass(frozen=True, slots=True)
class Held:
    """A part of a stored block."""

    piece: Piece
    origin: Origin
    # Its rows are in memory, and stored again as a block: the stored one is lost, or another
    # agent's, of which no more may be kept.
    is_resaved: bool = False
    window: BlockRef | None = None  # the same tokens of window layers, where they are stored

    @property
    def tokens_count(self) -> int:
        """Number of tokens."""
        return self.piece.tokens_count

    @property
    def tokens(self) -> U32s:
        """The tokens that its rows were computed from."""
        return self.origin.tokens[self.piece.start : self.piece.end]


@dataclass(frozen=True, slots=True)
class Hole:
    """Tokens that have to be computed in place."""

    tokens_count: int


Part: TypeAlias = Held | Hole


@dataclass(frozen=True, slots=True)
class Layout:
    """Parts of a cache in order; edits affect the first `head_tokens`, whole blocks follow.

    An unedited cache has no head and no holes.
    """

    parts: tuple[Part, ...] = ()
    head_tokens: int = 0
    exact_tokens: int = 0  # of the head, before its first edit
    notes: tuple[EditNote, ...] = ()
    lenders: tuple[Lender, ...] = ()  # agents whose rows it contains or was computed from
    states: tuple[Placed, ...] = ()  # of recurrent layers, in order; only of an unedited cache

    @property
    def tokens_count(self) -> int:
        """Tokens of all parts."""
        return sum(part.tokens_count for part in self.parts)

    @property
    def is_edited(self) -> bool:
        """Return whether any part was computed before an earlier part was edited."""
        return self.head_tokens > 0 and self.tokens_count > self.exact_tokens

    def without_needless_head(self) -> "Layout":
        """Return the layout without a head if no edit affects any of its parts."""
        return self if self.is_edited else Layout(self.parts, states=self.states)

    def placed(self) -> Iterator[tuple[int, int, Part]]:
        """Yield start, end and part, in order."""
        end = 0
        for part in self.parts:
            start, end = end, end + part.tokens_count
            yield start, end, part

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement of a cache that is restored from this layout."""
        if not self.head_tokens and Hole not in map(type, self.parts):
            return Arrangement.of([(0, self.tokens_count)], ())
        stored_parts = [
            (start, end, part) for start, end, part in self.placed() if isinstance(part, Held)
        ]
        ranges = [(start, end) for start, end, _ in stored_parts]
        shifts = [
            Shift(start, end, p.piece.delta) for start, end, p in stored_parts if p.piece.delta
        ]
        return Arrangement.of(ranges, shifts)

    @property
    def held(self) -> tuple[Held, ...]:
        """The parts that are stored, without holes."""
        return tuple(part for part in self.parts if isinstance(part, Held))

    @property
    def blocks(self) -> list[BlockRef]:
        """The blocks of full layers, one for each part."""
        return [part.piece.block for part in self.held]

    @property
    def pieces(self) -> PieceTable:
        """The pieces of a layout without holes."""
        return PieceTable(tuple(part.piece for part in self.held))

    @property
    def tokens(self) -> U32s:
        """The tokens of a layout without holes."""
        return U32s.unpack(b"".join(part.tokens.pack() for part in self.held))

    @property
    def windows(self) -> tuple[Placed, ...]:
        """The blocks of window layers, and the token at which each ends."""
        return tuple(
            Placed(part.window, end)
            for _, end, part in self.placed()
            if isinstance(part, Held) and part.window is not None
        )

    @property
    def blocks_after_head(self) -> tuple[BlockRef, ...]:
        """Blocks stored whole after the edited head, of all groups of layers, and states."""
        whole = [
            part
            for start, _, part in self.placed()
            if start >= self.head_tokens and isinstance(part, Held) and part.piece.is_whole
        ]
        windows = [part.window for part in whole if part.window is not None]
        states = [state.block for state in self.states]
        return (*(part.piece.block for part in whole), *windows, *states)

    def stored(self, missing: AbstractSet[BlockRef]) -> "Layout":
        """Cut the layout before the first missing block; drop missing windows and states."""
        if not missing:
            return self
        end = next(
            (
                start
                for start, _, part in self.placed()
                if isinstance(part, Held) and part.piece.block in missing
            ),
            self.tokens_count,
        )
        return self.cut(end).with_lost_blocks(missing)

    def with_lost_blocks(
        self, lost: AbstractSet[BlockRef], windows_from: int = AGENT_TOKENS_MAX
    ) -> "Layout":
        """Return the layout with parts of lost blocks marked to be saved again from memory.

        Memory has window rows from `windows_from` on. Parts there are saved again together with
        their windows, under a new name.
        """
        if not lost:
            return self
        parts = tuple(
            _mark_lost(part, lost, is_resident=start >= windows_from)
            for start, _, part in self.placed()
        )
        states = tuple(state for state in self.states if state.block not in lost)
        return replace(self, parts=parts, states=states)

    @property
    def refs(self) -> list[BlockRef]:
        """All blocks of the layout, of all groups of layers."""
        windows = [part.window for part in self.held if part.window is not None]
        return [*self.blocks, *windows, *(state.block for state in self.states)]

    @property
    def grid(self) -> WindowGrid:
        """Grid of the window blocks to store: in the holes, and after the edited head."""
        if not self.head_tokens:
            return UNEDITED_GRID
        holes = [(start, end) for start, end, part in self.placed() if isinstance(part, Hole)]
        within = [(start, end) for start, end in holes if start < self.head_tokens]
        return WindowGrid(self.exact_tokens, (*within, (self.head_tokens, AGENT_TOKENS_MAX)))

    def without(self, start: int, end: int) -> "Layout":
        """Return the layout with the tokens `start:end` of its head as a hole."""
        before, after = (
            _slice_parts(self, 0, start, 0),
            _slice_parts(self, end, self.tokens_count, 0),
        )
        parts = (*before, Hole(end - start), *after)
        return replace(self, parts=parts, exact_tokens=min(self.exact_tokens, start))

    def cut(self, tokens_count: int) -> "Layout":
        """Return the layout of the first `tokens_count` tokens."""
        if tokens_count >= self.tokens_count:
            return self
        head = min(self.head_tokens, tokens_count)
        parts = tuple(_slice_parts(self, 0, tokens_count, 0))
        exact = min(self.exact_tokens, head)
        states = tuple(state for state in self.states if state.end <= tokens_count)
        return Layout(parts, head, exact, self.notes, self.lenders, states)

    def parts_of(self, start: int, end: int, shift: int) -> tuple[Part, ...]:
        """Return the parts of the tokens `start:end`, moved by `shift`."""
        return tuple(_slice_parts(self, start, end, shift))

    def with_parts(self, parts: Iterable[Part]) -> "Layout":
        """Return the layout with its parts replaced by `parts` of the same lengths."""
        return replace(self, parts=tuple(parts))

    def without_open_end(self) -> "Layout":
        """Drop holes at the end, since tokens after the last stored part are computed anyway."""
        ends = [end for _, end, part in self.placed() if isinstance(part, Held)]
        return self.cut(ends[-1] if ends else 0)

    def moved(self, moves: Sequence[Move], notes: Sequence[EditNote] = ()) -> "Layout":
        """Return the layout after `moves`, with holes where no tokens move to."""
        assert (moves[0].start, moves[0].new_start) == (0, 0), "the head stays in place"
        parts: list[Part] = []
        end = 0
        for move in moves:
            if move.new_start > end:
                parts.append(Hole(move.new_start - end))
            parts += _slice_parts(self, move.start, move.end, move.new_start - move.start)
            end = move.new_end
        exact = min(self.exact_tokens, moves[0].end) if self.head_tokens else moves[0].end
        notes = newest_notes(self.notes, notes)
        return Layout(tuple(merge_parts(parts)), end, exact, notes, self.lenders)


EMPTY_LAYOUT: Final = Layout()


def unedited_layout(record: Manifest | None, tokens_max: int = AGENT_TOKENS_MAX) -> Layout:
    """Return the layout of a record's first tokens, up to its first edit or `tokens_max`."""
    if record is None:
        return EMPTY_LAYOUT
    windows = {place.end: place.block for place in record.windows}
    parts: list[Held] = []
    start, parent = 0, ROOT_PARENT
    for piece in unedited_pieces(record):
        if start >= tokens_max or start % BLOCK_TOKENS:  # a partial block is the last one
            break
        end = start + piece.tokens_count
        origin = Origin(parent, record.token_ids[start:end])
        parts.append(Held(piece, origin, window=windows.get(end)))
        start, parent = end, piece.block.block_hash
    states = tuple(place for place in record.states if place.end <= start)
    return Layout(tuple(parts), states=states).cut(tokens_max)


def unedited_pieces(record: Manifest, tokens_max: int = AGENT_TOKENS_MAX) -> PieceTable:
    """Return a record's whole blocks before its first edit that end within `tokens_max`."""
    if record.edited is not None:
        tokens_max = min(tokens_max, record.edited.exact_tokens)
    return record.pieces.unedited(tokens_max)


def exact_beginning(record: Manifest) -> Layout:
    """Return the layout of a record before its first edit, including the block that the edit cut.

    That block is complete on disk, with its tokens from before the edit, from which its name
    follows.
    """
    layout, head = unedited_layout(record), record.edited
    index, start = len(layout.parts), layout.tokens_count
    if head is None or start % BLOCK_TOKENS or index >= len(head.origins):
        return layout
    cut = record.pieces[index]
    if (cut.start, cut.delta) != (0, 0):
        return layout
    block, end = cut.block, start + cut.tokens_count
    window = next((place.block for place in record.windows if place.end == end), None)
    whole = Held(Piece(block, 0, block.tokens_count), head.origins[index], window=window)
    return replace(layout, parts=(*layout.parts, whole))


def layout_of(record: Manifest, named: Sequence[tuple[BlockRef, BlockSpan]]) -> Layout:
    """Return the layout of a record's cache; `named` are its blocks, in order."""
    windows = {place.end: place.block for place in record.windows}
    ends = accumulate(piece.tokens_count for piece in record.pieces)
    parts = [
        Held(
            piece,
            Origin(span.parent, U32s(span.tokens_in(record.token_ids))),
            window=windows.get(end),
        )
        for piece, (_, span), end in zip(record.pieces, named, ends, strict=False)
    ]
    head = record.edited
    if head is None:
        return Layout(tuple(parts), states=record.states)
    lenders = head.known_lenders
    return Layout(tuple(parts), head.tokens_count, head.exact_tokens, head.notes, lenders)


@dataclass(frozen=True, slots=True)
class Unstored:
    """Block to be saved, and the shift of its rows."""

    span: BlockSpan
    delta: int = 0


@dataclass(frozen=True, slots=True)
class NamedHead:
    """Edited head with named blocks for its holes, and the lineage of the blocks after it."""

    layout: Layout
    parts: tuple[Held | Unstored, ...]
    lineage: EditLineage

    @property
    def spans(self) -> tuple[BlockSpan, ...]:
        """The blocks to save: those of holes, and lost ones."""
        return tuple(part.span for part in self.parts if isinstance(part, Unstored))

    @property
    def windows(self) -> Iterator[tuple[int, BlockRef]]:
        """The stored window blocks, each with the end of its part."""
        end = 0
        for part in self.parts:
            if isinstance(part, Unstored):
                end = part.span.end
                continue
            end += part.tokens_count
            if part.window is not None:
                yield end, part.window

    def filled(self, refs: Iterable[BlockRef], ids: U32s) -> tuple[PieceTable, EditedHead]:
        """Return the head's pieces and record, once its `spans` are stored as `refs`."""
        stored, pieces, origins = iter(refs), [], []
        for part in self.parts:
            if isinstance(part, Unstored):
                ref, span = next(stored), part.span
                pieces.append(Piece(ref, 0, ref.tokens_count, part.delta))
                origins.append(Origin(span.parent, U32s(span.tokens_in(ids))))
            else:
                pieces.append(part.piece)
                origins.append(part.origin)
        layout = self.layout
        head = EditedHead(
            layout.head_tokens,
            layout.exact_tokens,
            tuple(origins),
            layout.notes,
            # With this many notes, an absent list would mean unknown lenders.
            layout.lenders if layout.lenders or len(layout.notes) == EDITS_NOTED_MAX else None,
        )
        return PieceTable(tuple(pieces)), head


def named_head(
    layout: Layout, salt: bytes, fingerprint: Fingerprint, ids: Sequence[int]
) -> NamedHead:
    """Name the blocks of a layout's holes, each by a digest of all parts before it."""
    head = layout.cut(layout.head_tokens)
    parts: list[Held | Unstored] = []
    lineage = _Lineage()
    for start, end, part in head.placed():
        if isinstance(part, Hole):
            before = EditLineage(start, lineage.digest())
            for span in block_spans(salt, fingerprint, ids[:end], lineage=before):
                parts.append(Unstored(span))
                lineage.add(span.block_hash, 0, span.end - span.start, 0)
        elif part.is_resaved:
            span = _resaved_span(part, salt, fingerprint, start)
            parts.append(Unstored(span, part.piece.delta))
            lineage.add(span.block_hash, 0, part.tokens_count, part.piece.delta)
        else:
            piece = part.piece
            parts.append(part)
            lineage.add(piece.block.block_hash, piece.start, piece.end, piece.delta)
    return NamedHead(head, tuple(parts), EditLineage(layout.head_tokens, lineage.digest()))


def _resaved_span(part: Held, salt: bytes, fingerprint: Fingerprint, start: int) -> BlockSpan:
    """Name a part that is saved again: like its block if it is whole, otherwise by its range."""
    piece, origin, end = part.piece, part.origin, start + part.tokens_count
    if part.tokens_count == piece.block.tokens_count:
        return BlockSpan(start, end, origin.parent, piece.block.block_hash)
    if not piece.start:  # the first rows of a block depend on these tokens only
        name = block_hash(salt, fingerprint, origin.parent, origin.tokens[: piece.end])
        return BlockSpan(start, end, origin.parent, name)
    of = _Lineage()
    of.add(piece.block.block_hash, piece.start, piece.end, 0)
    parent = edited_parent(salt, piece.block.block_hash, of.digest())
    tokens = origin.tokens[piece.start : piece.end]
    return BlockSpan(start, end, parent, block_hash(salt, fingerprint, parent, tokens))


def head_lineage(record: Manifest) -> EditLineage:
    """Return the lineage that names the blocks after a record's edited head."""
    assert record.edited is not None, "only edited records have a head"
    lineage = _Lineage()
    for piece in record.pieces.items[: len(record.edited.origins)]:
        lineage.add(piece.block.block_hash, piece.start, piece.end, piece.delta)
    return EditLineage(record.edited.tokens_count, lineage.digest())


class _Lineage:
    """Digest of a cache's parts."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=LINEAGE_BYTES, person=b"mf-lineage-v1")

    def add(self, block: BlockHash, start: int, end: int, delta: int) -> None:
        self._hash.update(block)
        for number in (start, end, delta):
            self._hash.update(number.to_bytes(8, "little", signed=True))

    def digest(self) -> bytes:
        return self._hash.digest()


def _mark_lost(part: Part, lost: AbstractSet[BlockRef], *, is_resident: bool) -> Part:
    if not isinstance(part, Held):
        return part
    has_window = part.window is None or part.window not in lost
    is_lost = part.piece.block in lost or (is_resident and not has_window)
    if has_window and not is_lost:
        return part
    # A part that is saved again gets a new name, and so do its windows.
    window = part.window if has_window and not is_lost else None
    return replace(part, is_resaved=part.is_resaved or is_lost, window=window)


def _slice_parts(layout: Layout, start: int, end: int, shift: int) -> Iterator[Part]:
    """Yield the parts of the tokens `start:end`, moved by `shift`."""
    for part_start, part_end, part in layout.placed():
        first, last = max(start, part_start), min(end, part_end)
        if first >= last:
            continue
        if isinstance(part, Hole):
            yield Hole(last - first)
            continue
        if not shift and (first, last) == (part_start, part_end):
            yield part
            continue
        at = part.piece.start - part_start
        piece = replace(part.piece, start=first + at, end=last + at).moved(shift)
        yield replace(part, piece=piece)


def merge_parts(parts: Iterable[Part]) -> Iterator[Part]:
    """Merge consecutive parts that are adjacent in one block."""
    last: Part | None = None
    for part in parts:
        if isinstance(last, Held) and isinstance(part, Held) and part.piece.continues(last.piece):
            last = replace(last, piece=replace(last.piece, end=part.piece.end))
            continue
        if last is not None:
            yield last
        last = part
    if last is not None:
        yield last
