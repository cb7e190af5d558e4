"""Read an edited cache back: parts of blocks, each to where it lies now, around holes.

Every block is read whole and checked as ever, and its tokens are compared with those of the record;
of a block at an edit the part that is left is copied from beside the cache. Of window layers those
rows are read that are seen in front of a hole, or of the end.
"""

import logging
import threading
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from fabric.errors import CorruptDataError
from fabric.ids import TenantId
from fabric.kvcache.block import BlockRef
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import group_hash, token_bytes
from fabric.record.layout import Held, Hole, Layout, Part
from fabric.record.window_restore import with_windows
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.block_readers import UnreadBlockError, failed_reads
from node.store.staging import Place

_log = logging.getLogger(__name__)


def load_layout(
    store: AgentStore,
    tenant: TenantId,
    ids: Sequence[int],
    layout: Layout,
    cache: ResidentCache,
    loaded_tokens: int = 0,
    *,
    cancel: threading.Event | None = None,
    goes_on: bool = False,
) -> Layout:
    """Read a layout's blocks straight into an unused `cache`; return what of it that holds then.

    `ids` are the tokens that it claims to hold. Where `cancel` is set, nothing more is read.
    `goes_on`: as `load_parts` has it; if then nothing behind the first edit is left, what the turn
    computes there is as if there had been none.
    """

    def usable(found: Layout) -> Layout:
        found = with_windows(found, store.spec.window_tokens)
        return found.as_it_is() if goes_on else found

    good = load_parts(
        store, tenant, ids, layout, cache, loaded_tokens, cancel=cancel, goes_on=goes_on
    )
    good = usable(good)
    lost = _load_windows(store, tenant, good, cache, cancel)
    while lost is not None:
        good = usable(good.losing({lost}))
        lost = _load_windows(store, tenant, good, cache, cancel)
    found = good.arrangement
    cache.hold(found.tokens_count, found.ahead, found.shifts, good.grid)
    return good


def _load_windows(
    store: AgentStore,
    tenant: TenantId,
    layout: Layout,
    cache: ResidentCache,
    cancel: threading.Event | None,
) -> BlockRef | None:
    """Read what window layers see in front of each place; return the first block that failed."""
    for (start, end), rows in cache.windows.place_edited(layout.arrangement, layout.grid):
        for part_start, part_end, part in layout.placed():
            first, last = max(start, part_start), min(end, part_end)
            if first >= last or not isinstance(part, Held):
                continue
            assert part.window is not None, "it is stored, or nothing is kept behind it"
            is_wanted = cancel is None or not cancel.is_set()
            views = [row[:, first - start : last - start] for row in rows]
            at = part.piece.start - part_start
            if not is_wanted or not _read_window(store, tenant, part, first + at, views):
                return part.window
    return None


def _read_window(
    store: AgentStore, tenant: TenantId, part: Held, offset: int, places: Sequence[Place]
) -> bool:
    """Read the rows of a block from `offset` on; say whether they are good."""
    window, origin = part.window, part.origin
    name = group_hash(store.salt(tenant), part.piece.block.block_hash, CacheGroup.WINDOW)
    if window is None or window.block_hash != name:
        return False
    views = _beside(places, window.tokens_count)
    try:
        store.blocks.load_into(window, origin.parent, origin.tokens, views)
    except CorruptDataError as error:
        _log.warning("a window of an edited cache is a miss: %s", error.message)
        return False
    for place, view in zip(places, views, strict=True):
        place[:] = view[:, offset : offset + place.shape[1]]
    return True


def load_parts(
    store: AgentStore,
    tenant: TenantId,
    ids: Sequence[int],
    layout: Layout,
    cache: ResidentCache,
    loaded_tokens: int = 0,
    *,
    cancel: threading.Event | None = None,
    goes_on: bool = False,
) -> Layout:
    """Read a layout's blocks into a `cache` that nothing can run on yet; return what is good.

    The parts of the first `loaded_tokens` are in it already. Where a turn `goes_on`, what is lost
    between edits is a hole; else all behind it is left out.
    """
    rows, placed = cache.rows(), list(layout.placed())
    parts: list[Part] = [part for _, _, part in placed]
    stored = [
        (index, start, end, part)
        for index, (start, end, part) in enumerate(placed)
        if isinstance(part, Held) and end > loaded_tokens
    ]

    def is_wanted() -> bool:
        return cancel is None or not cancel.is_set()

    def read(number: int) -> None:
        _, start, end, part = stored[number]
        if not is_wanted() or not _read(store, tenant, ids[start:end], part, rows, start):
            raise UnreadBlockError

    for number in failed_reads(len(stored), read, store.blocks.readers_count):
        index, start, end, _ = stored[number]
        if not (is_wanted() and goes_on and layout.exact_tokens <= start < layout.head_tokens):
            return layout.cut(start).with_parts(parts[:index]).without_open_end()
        parts[index] = Hole(end - start)
    return layout.with_parts(parts).without_open_end() if goes_on else layout


def _read(
    store: AgentStore,
    tenant: TenantId,
    tokens: Sequence[int],
    part: Held,
    rows: Sequence[Place],
    start: int,
) -> bool:
    """Read one part to position `start`; say whether it is good."""
    piece, origin = part.piece, part.origin
    if token_bytes(origin.tokens[piece.start : piece.end]) != token_bytes(tokens):
        return False
    if not store.is_named(tenant, piece.block, origin):
        return False
    places = [row[:, start : start + piece.tokens_count] for row in rows]
    is_whole = piece.tokens_count == piece.block.tokens_count
    views = places if is_whole else _beside(rows, piece.block.tokens_count)
    try:
        store.blocks.load_into(piece.block, origin.parent, origin.tokens, views)
    except CorruptDataError as error:
        _log.warning("a block of an edited cache at token %d is a miss: %s", start, error.message)
        return False
    if not is_whole:
        for place, view in zip(places, views, strict=True):
            place[:] = view[:, piece.start : piece.end]
    return True


def _beside(rows: Sequence[Place], tokens_count: int) -> list[Place]:
    """Return room for a block's tokens, beside the cache."""
    shapes = [(row.shape[0], tokens_count, row.shape[2]) for row in rows]
    sizes = [heads * count * width for heads, count, width in shapes]
    room = np.empty(sum(sizes), np.uint8)
    starts = accumulate(sizes, initial=0)
    return [
        room[at : at + size].reshape(shape)
        for at, size, shape in zip(starts, sizes, shapes, strict=False)
    ]
