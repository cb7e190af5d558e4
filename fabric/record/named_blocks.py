"""Names that the blocks of a record must have, by its tokens."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from fabric.kvcache.block import BlockRef
from fabric.kvcache.block_chain import UNEDITED, BlockSpan, block_spans, span_ending
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import block_hash
from fabric.record.layout import head_lineage
from fabric.record.manifest import Manifest
from fabric.record.piece_table import Piece


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
    """Yield an edited record's window blocks, named by the pieces that end where they do."""
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
