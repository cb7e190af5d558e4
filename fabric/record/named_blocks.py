"""What the blocks of a record must be called, by its tokens."""

from fabric.kvcache.block import BlockRef
from fabric.kvcache.block_chain import BlockSpan, block_spans, span_ending
from fabric.record.manifest import Manifest


def named_blocks(record: Manifest, salt: bytes) -> list[tuple[BlockRef, BlockSpan]]:
    """Pair a record's blocks, in the order of its `refs`, with the blocks of its tokens.

    Pieces are paired up to the first that is not a whole block in its own place: behind it nothing
    can be said. A block is the record's own if its span `names` it.
    """
    ids, model = record.token_ids, record.fingerprint
    spans = block_spans(salt, model, ids)
    unedited = record.pieces.unedited(record.tokens_count)
    named = []
    for ref, span in zip(unedited.blocks, spans, strict=False):
        if ref.tokens_count != span.end - span.start:
            break
        named.append((ref, span))
    for place in (*record.windows, *record.states):
        span = span_ending(salt, model, ids, spans, place.end)
        named.append((place.block, span.in_group(salt, place.block.group)))
    return named
