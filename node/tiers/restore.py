"""Restore: read the stored blocks of a layout into an unused cache, as far as they are good.

Each block is read and checked as a whole, and its name must follow from its tokens and all before
them. If the layout has a part of a block only, that part is copied from a buffer.

Several blocks are read at once: one waits for the drive while others are checked. The calling
thread reads, too, so a pool that is busy with other restores delays none. Reads of one restore
start in order; the first failure ends it, once the running reads have ended.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np

from fabric.errors import CorruptDataError
from fabric.ids import TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import token_bytes
from fabric.ports import Clock
from fabric.record.edited_head import Origin
from fabric.record.layout import Held, Hole, Layout, Part
from node.engine.prefill_chunks import Speed
from node.limits import BLOCK_READERS, RESTORE_MEASURED_BYTES_MIN
from node.mlx.resident_cache import ResidentCache
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.block_store import BlockMissingError
from node.store.staging import Place

_log = logging.getLogger(__name__)
_POOL: Final = ThreadPoolExecutor(BLOCK_READERS - 1, thread_name_prefix="block reader")


class UnreadBlockError(Exception):
    """A block was not read: it is missing or not the expected one, or the restore was cancelled."""


class BlockReads:
    """The reads of one restore."""

    def __init__(self, count: int, read: Callable[[int], None]) -> None:
        """Prepare to read the first `count` blocks by `read(index)`, which raises on a failure."""
        self._count = count
        self._read = read
        self._lock = threading.Lock()
        self._next = 0
        self._failed: dict[int, BaseException] = {}

    def run(self, readers_count: int = BLOCK_READERS) -> tuple[int, BaseException | None]:
        """Return how many leading blocks were read, and why no more were; raise nothing."""
        helpers_count = min(readers_count, self._count) - 1
        helpers = [_POOL.submit(self._pull) for _ in range(helpers_count)]
        self._pull()
        wait([helper for helper in helpers if not helper.cancel()])
        if not self._failed:
            return self._count, None
        first = min(self._failed)
        return first, self._failed[first]

    def _pull(self) -> None:
        while (index := self._take()) is not None:
            try:
                self._read(index)
            except UnreadBlockError:
                with self._lock:  # the first one's traceback references the cache
                    self._failed[index] = UnreadBlockError()
            except BaseException as error:  # noqa: BLE001 - the caller of `run` decides
                with self._lock:
                    self._failed[index] = error

    def _take(self) -> int | None:
        with self._lock:
            if self._failed or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1


def failed_reads(
    count: int, read: Callable[[int], None], readers_count: int = BLOCK_READERS
) -> Iterator[int]:
    """Read the first `count` blocks; yield each that raises UnreadBlockError, and continue.

    Any other error of a read is raised.
    """
    first = 0
    while first < count:
        done, error = BlockReads(count - first, lambda at: read(first + at)).run(readers_count)  # noqa: B023
        if error is None:
            return
        if not isinstance(error, UnreadBlockError):
            raise error
        yield first + done
        first += done + 1


class Restores:
    """Reader of layouts on the node's worker threads, which measures its speed."""

    def __init__(self, store: AgentStore, workers: Workers, clock: Clock) -> None:
        self._store = store
        self._workers = workers
        self._clock = clock
        self._speed = Speed()

    @property
    def bytes_per_s(self) -> float | None:
        """Speed of the last restores, in bytes of memory; None until one was long enough."""
        return self._speed.per_s or None

    async def read(
        self,
        tenant: TenantId,
        ids: Sequence[int],
        layout: Layout,
        cache: ResidentCache,
        cancel: threading.Event,
        *,
        fills_holes: bool = False,
    ) -> Layout:
        """Read a layout's blocks as `load_layout` does, off the event loop."""
        store, began_s = self._store, self._clock.monotonic_s()
        restored = await self._workers.run(
            lambda: load_layout(
                store, tenant, ids, layout, cache, cancel=cancel, fills_holes=fills_holes
            )
        )
        read_bytes = restored.tokens_count * store.spec.bytes_per_token
        if read_bytes >= RESTORE_MEASURED_BYTES_MIN and not cancel.is_set():
            self._speed.add(read_bytes, self._clock.monotonic_s() - began_s)
        return restored


def load_layout(
    store: AgentStore,
    tenant: TenantId,
    ids: Sequence[int],
    layout: Layout,
    cache: ResidentCache,
    loaded_tokens: int = 0,
    *,
    cancel: threading.Event | None = None,
    fills_holes: bool = False,
) -> Layout:
    """Read a layout's blocks into an unused `cache`; return the part that it then holds.

    `ids` are the layout's tokens. Parts of the first `loaded_tokens` are in the cache already.
    Once `cancel` is set, no more blocks are read, and the cache holds nothing. With `fills_holes`,
    the parts after a lost block of the edited head are kept; otherwise the layout ends there.
    """
    restore = _Restore(store, tenant, ids, cache, cancel, fills_holes=fills_holes)
    return restore.run(layout, loaded_tokens)


def load_parts(
    store: AgentStore,
    tenant: TenantId,
    ids: Sequence[int],
    layout: Layout,
    cache: ResidentCache,
    loaded_tokens: int = 0,
    *,
    cancel: threading.Event | None = None,
) -> Layout:
    """Read only a layout's full layers, into a cache that is not usable yet."""
    return _Restore(store, tenant, ids, cache, cancel).load_parts(layout, loaded_tokens)


class _Restore:
    """Restore of a layout, which is shortened after each block that fails."""

    def __init__(
        self,
        store: AgentStore,
        tenant: TenantId,
        ids: Sequence[int],
        cache: ResidentCache,
        cancel: threading.Event | None,
        *,
        fills_holes: bool = False,
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._ids = ids
        self._cache = cache
        self._cancel = cancel
        self._fills_holes = fills_holes
        self._is_damaged = False  # a damaged block was found
        self._is_verified = False  # all other blocks were then read again

    def run(self, layout: Layout, loaded_tokens: int) -> Layout:
        good = self._restorable(self.load_parts(layout, loaded_tokens))
        while not self._is_cancelled:
            lost_block = self._load_windows(good) or self._load_state(good)
            if lost_block is None:
                break
            self._verify_if_damaged(good)
            good = self._restorable(good.with_lost_blocks({lost_block}))
        if self._is_cancelled:
            good = self._restorable(good.cut(0))
        if not good.parts:  # a failed restore may have left windows and states of a later token
            self._cache.place_windows(0)
            self._cache.clear_states()
        arrangement = good.arrangement
        self._cache.hold(arrangement.tokens_count, arrangement.ahead, arrangement.shifts, good.grid)
        return good

    def load_parts(self, layout: Layout, loaded_tokens: int) -> Layout:
        """Read the full layers; return the layout up to the first lost block, or with holes."""
        rows, placed = self._cache.rows(), list(layout.placed())
        parts: list[Part] = [part for _, _, part in placed]
        wanted = [
            (index, start, end, part)
            for index, (start, end, part) in enumerate(placed)
            if isinstance(part, Held) and end > loaded_tokens
        ]

        def read(number: int) -> None:
            _, start, end, part = wanted[number]
            if token_bytes(part.tokens) != token_bytes(self._ids[start:end]):
                raise UnreadBlockError
            piece, views = part.piece, [row[:, start:end] for row in rows]
            self._read(_BlockRead(piece.block, part.origin, CacheGroup.FULL, piece.start, views))

        readers_count = self._store.blocks.readers_count
        for number in failed_reads(len(wanted), read, readers_count):
            index, start, end, _ = wanted[number]
            self._verify_if_damaged(layout)
            is_edited = layout.exact_tokens <= start < layout.head_tokens
            if self._is_cancelled or not (self._fills_holes and is_edited):
                return layout.cut(start).with_parts(parts[:index]).without_open_end()
            parts[index] = Hole(end - start)
        return layout.with_parts(parts).without_open_end() if self._fills_holes else layout

    def _restorable(self, layout: Layout) -> Layout:
        layout = self._store.restorable(layout)
        return layout.without_needless_head() if self._fills_holes else layout

    def _load_windows(self, layout: Layout) -> BlockRef | None:
        """Read the windows before each token that is computed next; return the first lost block."""
        reads = []
        for (start, end), rows in self._cache.windows.place_edited(layout.arrangement, layout.grid):
            for part_start, part_end, part in layout.placed():
                first, last = max(start, part_start), min(end, part_end)
                if first >= last or not isinstance(part, Held):
                    continue
                assert part.window is not None, "a kept part has its window stored"
                views = [row[:, first - start : last - start] for row in rows]
                row = part.piece.start + first - part_start
                reads.append(_BlockRead(part.window, part.origin, CacheGroup.WINDOW, row, views))
        return self._first_lost(reads)

    def _load_state(self, layout: Layout) -> BlockRef | None:
        """Read the recurrent state of the last token; return its block if that is lost."""
        if CacheGroup.STATE not in self._store.spec.groups or not layout.parts:
            return None
        state, part = layout.states[-1], layout.held[-1]
        assert state.end == layout.tokens_count, "a cache ends where its state does"
        origin = replace(part.origin, tokens=part.tokens)  # the state's block may end earlier
        places = [np.asarray(view) for view in self._cache.state_views()]
        return self._first_lost([_BlockRead(state.block, origin, CacheGroup.STATE, 0, places)])

    def _first_lost(self, reads: Sequence["_BlockRead"]) -> BlockRef | None:
        count, error = BlockReads(len(reads), lambda index: self._read(reads[index])).run(
            self._store.blocks.readers_count
        )
        if error is None:
            return None
        if not isinstance(error, UnreadBlockError):
            raise error
        return reads[count].block

    def _read(self, read: "_BlockRead") -> None:
        """Read one block; raise UnreadBlockError unless it is sound and the expected one."""
        block, origin = read.block, read.origin
        if self._is_cancelled or not self._store.is_named(self._tenant, block, origin, read.group):
            raise UnreadBlockError
        places, is_read = read.buffer() if read.is_partial else read.places, True
        try:
            self._store.blocks.load_into(block, origin.parent, origin.tokens, places)
        except CorruptDataError as error:
            _log.warning("cannot restore block %s: %s", block.name, error.message)
            if not isinstance(error, BlockMissingError):
                self._is_damaged = True
            is_read = False
        if not is_read:  # not chained: the cause's traceback would keep the cache alive
            raise UnreadBlockError
        if read.is_partial:
            read.copy_rows(places)

    def _verify_if_damaged(self, layout: Layout) -> None:
        """Check all blocks of the layout once, after the first that is damaged.

        The cause may have damaged other blocks. If found now, this turn recomputes and saves all of
        them; if found later, each of them would cost another turn.
        """
        if self._is_damaged and not self._is_verified:
            self._is_verified = True
            self._store.blocks.verify(layout.refs)

    @property
    def _is_cancelled(self) -> bool:
        return self._cancel is not None and self._cancel.is_set()


@dataclass(frozen=True, slots=True)
class _BlockRead:
    """Block to read, and the destinations of its rows from `first_row` on, in file order."""

    block: BlockRef
    origin: Origin
    group: CacheGroup
    first_row: int
    places: Sequence[Place]

    @property
    def is_partial(self) -> bool:
        """Return whether the places have room for some rows of the block only."""
        is_state = self.group is CacheGroup.STATE
        return not is_state and any(p.shape[1] != self.block.tokens_count for p in self.places)

    def buffer(self) -> list[Place]:
        """Return a buffer for the whole block, outside the cache."""
        shapes = [(p.shape[0], self.block.tokens_count, p.shape[2]) for p in self.places]
        sizes = [heads * count * width for heads, count, width in shapes]
        room = np.empty(sum(sizes), np.uint8)
        starts = accumulate(sizes, initial=0)
        return [
            room[at : at + size].reshape(shape)
            for at, size, shape in zip(starts, sizes, shapes, strict=False)
        ]

    def copy_rows(self, buffer: Sequence[Place]) -> None:
        """Copy the wanted rows of a whole block to their places."""
        for place, rows in zip(self.places, buffer, strict=True):
            place[:] = rows[:, self.first_row : self.first_row + place.shape[1]]
