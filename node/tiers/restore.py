"""Restores: read stored blocks back into an unused cache, as far as they are good."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.errors import CorruptDataError
from fabric.ids import TenantId
from fabric.kvcache.block import BlockRef
from fabric.kvcache.block_chain import BlockSpan
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from fabric.record.restore_plan import window_blocks
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.available_blocks import AvailableBlocks
from node.store.block_readers import BlockReads, UnreadBlockError
from node.store.block_store import BlockMissingError
from node.store.staging import Place

_log = logging.getLogger(__name__)


def load_blocks(
    store: AgentStore,
    tenant: TenantId,
    ids: Sequence[int],
    available: AvailableBlocks,
    limit: int,
    cache: ResidentCache,
    loaded_tokens: int = 0,
    *,
    cancel: threading.Event | None = None,
) -> int:
    """Read blocks straight into an unused `cache`; return how many leading tokens are good.

    `ids` are the tokens that the blocks claim to hold. A block that is missing or fails
    any check is taken out of `available`, and less is restored. The first `loaded_tokens` are in
    the cache already, in full blocks. Where `cancel` is set, nothing more is read, and 0 returned.
    """
    return _Loading(store, tenant, ids, available, cache, loaded_tokens, cancel).run(limit)


def load_full_blocks(
    store: AgentStore,
    tenant: TenantId,
    ids: Sequence[int],
    available: AvailableBlocks,
    cache: ResidentCache,
    loaded_tokens: int = 0,
    *,
    cancel: threading.Event | None = None,
) -> int:
    """Read the full blocks of `available` alone, which nothing can run on yet; count tokens."""
    return _Loading(store, tenant, ids, available, cache, loaded_tokens, cancel).run_full()


class _Loading:
    """One restore: to the largest point that the blocks allow, or a smaller one after a failure."""

    def __init__(
        self,
        store: AgentStore,
        tenant: TenantId,
        ids: Sequence[int],
        available: AvailableBlocks,
        cache: ResidentCache,
        loaded_tokens: int,
        cancel: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._cancel = cancel
        self._tenant = tenant
        self._ids = ids
        self._available = available
        self._cache = cache
        self._salt = store.salt(tenant)
        self._spans = store.spans(tenant, ids)
        self._full_end = loaded_tokens  # of the full blocks read already
        self._is_suspect = False  # one was damaged

    def run(self, limit: int) -> int:
        while limit and not self._is_cancelled:
            point = self._store.restore_point(self._available, self._ids, limit)
            if not point:
                break
            is_whole = self._load_full(point) and self._load_windows(point)
            if is_whole and self._load_state(point) and not self._is_cancelled:
                return point
        # As new: what failed may have placed windows and states for a later token.
        self._cache.place_windows(0)
        self._cache.clear_states()
        return 0

    def run_full(self) -> int:
        self._load_full(self._available.full.tokens_count)
        return self._full_end

    def _load_full(self, point: int) -> bool:
        rows = self._cache.rows()
        spans = [span for span in self._spans if self._full_end <= span.start < point]
        reads = [
            _Read(
                self._available.full.resolve(span.start).block,
                span,
                [row[:, span.start : span.end] for row in rows],
            )
            for span in spans
        ]
        count = self._read_all(reads)
        if count:
            self._full_end = spans[count - 1].end
        if count == len(reads):
            return True
        self._available.full = self._available.full.slice(0, spans[count].start)
        return False

    def _load_windows(self, point: int) -> bool:
        if not self._available.windows:
            return True
        self._cache.place_windows(point)
        starts = list(window_blocks(point, self._cache.spec.window_tokens))
        whole = [self._spans[start // BLOCK_TOKENS] for start in starts]
        spans = [span.in_group(self._salt, CacheGroup.WINDOW) for span in whole]
        rows = self._cache.places(spans[0].start, spans[-1].end, CacheGroup.WINDOW)
        reads = []
        for span in spans:
            start, end = span.start - spans[0].start, span.end - spans[0].start
            views = [row[:, start:end] for row in rows]
            reads.append(_Read(self._available.windows[span.start], span, views))
        count = self._read_all(reads)
        if count == len(reads):
            return True
        del self._available.windows[starts[count]]
        return False

    def _load_state(self, point: int) -> bool:
        ref = self._available.states.get(point)
        if ref is None:
            return True
        span = self._store.state_span(self._tenant, self._ids, self._spans, point)
        if not self._read_all([_Read(ref, span, self._cache.state_views())]):
            del self._available.states[point]
            return False
        return True

    @property
    def _is_cancelled(self) -> bool:
        return self._cancel is not None and self._cancel.is_set()

    def _read_all(self, reads: Sequence["_Read"]) -> int:
        """Read blocks; return how many leading ones are the very ones that their places ask for."""
        blocks = self._store.blocks
        count, error = BlockReads(len(reads), lambda index: self._read(reads[index])).run(
            blocks.readers_count
        )
        if isinstance(error, CorruptDataError):
            _log.warning("block at token %d is a miss: %s", reads[count].span.start, error.message)
            if not isinstance(error, BlockMissingError) and not self._is_suspect:
                # What damaged one may have damaged more. Found now, all of it is computed and
                # saved again by this turn; found later, each would cost a turn of its own.
                self._is_suspect = True
                blocks.verify(self._available.refs())
        elif error is not None and not isinstance(error, UnreadBlockError):
            raise error
        return count

    def _read(self, read: "_Read") -> None:
        if self._is_cancelled or not read.span.names(read.ref):
            raise UnreadBlockError
        tokens = self._ids[read.span.start : read.span.end]
        self._store.blocks.load_into(read.ref, read.span.parent, tokens, read.views)


@dataclass(frozen=True, slots=True)
class _Read:
    """One block to read, the tokens that it must hold, and its places in file order."""

    ref: BlockRef
    span: BlockSpan
    views: Sequence[Place | memoryview]
