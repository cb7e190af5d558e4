"""Cut an agent's record down to what is still stored of it: a record never claims more.

pieces   [ good )[ good )[ lost )[ good )   ->   [ good )[ good )
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace

from fabric.kvcache.block import BlockRef
from fabric.record.bounds import text_bytes_max
from fabric.record.manifest import Manifest, Placed
from fabric.record.named_blocks import named_blocks
from fabric.record.provenance import TruncatedBy


def misplaced_refs(record: Manifest, salt: bytes) -> set[BlockRef]:
    """List blocks whose names do not follow from the record's tokens under `salt`."""
    return {ref for ref, span in named_blocks(record, salt) if not span.names(ref)}


def truncate_record(record: Manifest, unusable: AbstractSet[BlockRef]) -> Manifest:
    """Leave out everything that needs an unusable block; owner, epoch and revision stay.

    The result may have no tokens. It is marked, so that only its own id finds it: it begins
    like more conversations than the whole record did.
    """
    count = record.pieces.tokens_before(unusable)
    if count and record.token_ends[count - 1] > text_bytes_max(count):
        count = 0  # an answer without a space ends all its tokens at once: too far for these few
    is_whole = count == record.tokens_count
    pieces = record.pieces.slice(0, count)
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
        pieces=pieces,
        edited=record.edited.within(pieces) if record.edited is not None else None,
        windows=_within(record.windows, count, unusable),
        states=_within(record.states, count, unusable),
        sketch=record.sketch if is_whole else (),
        positions=record.positions.within(len(text)) if record.positions is not None else None,
        provenance=record.provenance
        if is_whole
        else replace(record.provenance, truncated_by=TruncatedBy.FSCK),
    )


def without_edited(record: Manifest) -> Manifest:
    """Leave out everything from the first piece on that an edit had a part in.

    A part of a block goes, too: only the head can name it, and its block holds removed text.
    """
    exact = record.edited.exact_tokens if record.edited is not None else record.tokens_count
    kept = len(record.pieces.unedited(exact))
    return truncate_record(record, {piece.block for piece in record.pieces.items[kept:]})


def _within(
    places: tuple[Placed, ...], count: int, unusable: AbstractSet[BlockRef]
) -> tuple[Placed, ...]:
    return tuple(place for place in places if place.end <= count and place.block not in unusable)
