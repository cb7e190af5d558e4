"""Cut an agent's record down to what is still stored of it: a record never claims more.

pieces   [ good )[ good )[ lost )[ good )   ->   [ good )[ good )
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace

from fabric.kvcache.block import BlockRef
from fabric.kvcache.block_chain import BlockSpan, block_spans, span_ending
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import Manifest, Placed
from fabric.record.provenance import TruncatedBy


def misplaced_refs(record: Manifest, salt: bytes) -> set[BlockRef]:
    """List blocks whose names do not follow from the record's tokens under `salt`.

    Behind a piece that is not a whole block in its own place nothing can be said.
    """
    ids = record.token_ids
    spans = block_spans(salt, record.fingerprint, ids)
    wrong, at = set(), 0
    for piece in record.pieces:
        span = spans[at // BLOCK_TOKENS]
        if not piece.is_whole or piece.end != span.end - span.start:
            break
        if (piece.block.block_hash, piece.block.group) != (span.block_hash, CacheGroup.FULL):
            wrong.add(piece.block)
        at += piece.end
    return wrong | _misplaced_others(record, salt, spans)


def _misplaced_others(record: Manifest, salt: bytes, spans: tuple[BlockSpan, ...]) -> set[BlockRef]:
    wrong = set()
    for place in (*record.windows, *record.states):
        ids, group = record.token_ids, place.block.group
        span = span_ending(salt, record.fingerprint, ids, spans, place.end)
        if place.block.block_hash != span.in_group(salt, group).block_hash:
            wrong.add(place.block)
    return wrong


def truncate_record(record: Manifest, unusable: AbstractSet[BlockRef]) -> Manifest:
    """Leave out everything that needs an unusable block; owner, epoch and revision stay.

    The result may have no tokens. It is marked, so that only its own id finds it: it begins
    like more conversations than the whole record did.
    """
    count = record.pieces.tokens_before(unusable)
    is_whole = count == record.tokens_count
    text = record.text.encode("utf-8", "surrogatepass")[
        : record.token_ends[count - 1] if count else 0
    ]
    return replace(
        record,
        # A token may end within a character: the replacement is no shorter than what it is for.
        text=text.decode("utf-8", "replace"),
        token_ids=record.token_ids[:count],
        token_ends=record.token_ends[:count],
        prompt_tokens_count=min(record.prompt_tokens_count, count),
        pieces=record.pieces.slice(0, count),
        windows=_within(record.windows, count, unusable),
        states=_within(record.states, count, unusable),
        sketch=record.sketch if is_whole else (),
        provenance=record.provenance
        if is_whole
        else replace(record.provenance, truncated_by=TruncatedBy.FSCK),
    )


def _within(
    places: tuple[Placed, ...], count: int, unusable: AbstractSet[BlockRef]
) -> tuple[Placed, ...]:
    return tuple(place for place in places if place.end <= count and place.block not in unusable)
