"""Stored part of a record: its block names, and what remains of it when some blocks are lost.

A record is cut before the first lost block, so it never claims more than is stored:

    pieces   [ good )[ good )[ lost )[ good )   ->   [ good )[ good )

To restore a cache from a layout (`restorable`), each kind of layer needs:

    full layers        every block
    window layers      one window before each token that is computed next: before the end and
                       before each hole
    recurrent layers   a state at exactly the last token

Missing window rows could be recomputed only by computing all tokens before them, so the tokens
after such a gap become a hole too.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import accumulate

from fabric.kvcache.arrangement import Range
from fabric.kvcache.block_chain import UNEDITED, BlockRef, BlockSpan, block_spans, span_ending
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import block_hash
from fabric.record.bounds import text_bytes_max
from fabric.record.branches import without_refs
from fabric.record.layout import Held, Layout, head_lineage
from fabric.record.manifest import Manifest, Placed
from fabric.record.piece_table import Piece
from fabric.record.provenance import TruncatedBy


def named_blocks(record: Manifest, salt: bytes) -> list[tuple[BlockRef, BlockSpan]]:
    """Pair a record's blocks, in the order of its `refs`, with the blocks of its tokens.

    Blocks of an edited head are named by their origins. After the head, pieces are paired up to the
    first that is not a whole block in its own place, as names after that cannot be known. A block
    is the record's own if its span `names` it.
    """
    ids, model = record.token_ids, record.fingerprint
    named = list(_of_head(record, salt))
    lineage = head_lineage(record) if record.edited is not None else UNEDITED
    spans = block_spans(salt, model, ids, lineage=lineage)
    for piece, span in zip(_after_head(record), spans, strict=False):
        if not piece.is_whole or piece.tokens_count != span.end - span.start:
            break
        named.append((piece.block, span))
    if record.edited is not None:
        return named + list(_windows_of_pieces(record, salt, [span for _, span in named]))
    for place in (*record.windows, *record.states):
        span = span_ending(salt, model, ids, spans, place.end)
        named.append((place.block, span.in_group(salt, place.block.group)))
    return named


def _windows_of_pieces(
    record: Manifest, salt: bytes, spans: Sequence[BlockSpan]
) -> Iterator[tuple[BlockRef, BlockSpan]]:
    """Yield an edited record's window blocks, named by the pieces with the same end."""
    ends = accumulate(piece.tokens_count for piece in record.pieces)
    by_end = dict(zip(ends, spans, strict=False))
    for place in record.windows:
        if place.end in by_end:
            yield place.block, by_end[place.end].in_group(salt, CacheGroup.WINDOW)


def _of_head(record: Manifest, salt: bytes) -> Iterator[tuple[BlockRef, BlockSpan]]:
    if record.edited is None:
        return
    for piece, origin in zip(record.pieces, record.edited.origins, strict=False):
        name = block_hash(salt, record.fingerprint, origin.parent, origin.tokens)
        span = BlockSpan(0, len(origin.tokens), origin.parent, name, own_tokens=origin.tokens)
        yield piece.block, span


def _after_head(record: Manifest) -> tuple[Piece, ...]:
    return record.pieces.items[len(record.edited.origins) if record.edited is not None else 0 :]


def misplaced_refs(record: Manifest, salt: bytes) -> set[BlockRef]:
    """List blocks whose names do not follow from the record's tokens under `salt`."""
    return {ref for ref, span in named_blocks(record, salt) if not span.names(ref)}


def truncate_record(record: Manifest, unusable: AbstractSet[BlockRef]) -> Manifest:
    """Drop everything that needs an unusable block; keep owner, epoch and revision.

    The result may have no tokens. It is marked as truncated, so that only a request with the
    agent's id finds it: its shorter text matches more conversations than the whole record did.
    """
    record = replace(record, branches=without_refs(record.branches, unusable))
    count = record.pieces.tokens_before(unusable)
    if count and record.token_ends[count - 1] > text_bytes_max(count):
        count = 0  # the text is too long for so few tokens: all of a spaceless answer ends at once
    is_whole = count == record.tokens_count
    pieces = record.pieces.slice(0, count)
    text = record.text.encode("utf-8", "surrogatepass")[
        : record.token_ends[count - 1] if count else 0
    ]
    return replace(
        record,
        # A token may end within a character; its replacement is at least as long.
        text=text.decode("utf-8", "replace"),
        token_ids=record.token_ids[:count],
        token_ends=record.token_ends[:count],
        prompt_tokens_count=min(record.prompt_tokens_count, count),
        pieces=pieces,
        edited=record.edited.within(pieces) if record.edited is not None else None,
        windows=_within(record.windows, count, unusable),
        states=_within(record.states, count, unusable),
        sketch=record.sketch if is_whole else (),
        form=record.form if is_whole else None,
        positions=record.positions.within(len(text)) if record.positions is not None else None,
        provenance=record.provenance
        if is_whole
        else replace(record.provenance, truncated_by=TruncatedBy.FSCK),
    )


def truncate_before_edits(record: Manifest) -> Manifest:
    """Drop all pieces from the first one that an edit affected.

    Pieces that are parts of a block are dropped too: only the edited head can name them, and their
    block holds removed text.
    """
    exact = record.edited.exact_tokens if record.edited is not None else record.tokens_count
    count = len(record.pieces.unedited(exact))
    return truncate_record(record, {piece.block for piece in record.pieces.items[count:]})


def _within(
    places: tuple[Placed, ...], count: int, unusable: AbstractSet[BlockRef]
) -> tuple[Placed, ...]:
    return tuple(place for place in places if place.end <= count and place.block not in unusable)


def restorable(layout: Layout, window_tokens: int, *, has_states: bool = False) -> Layout:
    """Return as much of the layout as its stored windows and states allow to restore."""
    if not window_tokens and not has_states:
        return layout
    lacking = [
        (start, end)
        for start, end, part in layout.placed()
        if isinstance(part, Held) and part.window is None
    ]
    layout = _beginning(layout, window_tokens, lacking, has_states=has_states)
    for start, end in layout.arrangement.ahead:
        if _is_window_lacking(lacking, max(start, end - window_tokens + 1), end):
            layout = layout.without(start, end)
    return layout.without_open_end()


def _beginning(
    layout: Layout, window_tokens: int, lacking: list[Range], *, has_states: bool
) -> Layout:
    """Cut the layout at the last token where its windows and a state are stored."""
    count = layout.arrangement.tokens_count
    if has_states:
        points = [state.end for state in reversed(layout.states) if state.end <= count]
    else:
        ends = [end for _, end, _ in layout.placed() if end < count]
        points = [count, *reversed(ends)]
    for point in points:
        first = max(0, point - window_tokens + 1)
        if not window_tokens or not _is_window_lacking(lacking, first, point):
            return layout if point == count else layout.cut(point)
    return layout.cut(0)


def _is_window_lacking(lacking: list[Range], start: int, end: int) -> bool:
    return any(first < end and start < last for first, last in lacking)


def trim_restore_points(record: Manifest, window_tokens: int) -> Manifest:
    """Drop windows and states that are needed only to restore at an earlier token."""
    first = max(0, record.tokens_count - window_tokens + 1)
    return replace(
        record,
        windows=tuple(place for place in record.windows if place.end > first),
        states=record.states[-1:],
    )
