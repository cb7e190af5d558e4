"""Restores: read stored blocks back into an unused cache, as far as they are good."""

import logging
import threading
from collections.abc import Sequence

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
    the cache already, in full blocks. Where `cancel` is set, nothing more is read.
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
        while limit and (point := self._store.restore_point(self._available, self._ids, limit)):
            if self._load_full(point) and self._load_windows(point) and self._load_state(point):
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
        while self._full_end < point:
            span = self._spans[self._full_end // BLOCK_TOKENS]
            place = self._available.full.resolve(span.start)
            views = [row[:, span.start : span.end] for row in rows]
            if not self._read(place.block, span, views):
                self._available.full = self._available.full.slice(0, span.start)
                return False
            self._full_end = span.end
        return True

    def _load_windows(self, point: int) -> bool:
        if not self._available.windows:
            return True
        self._cache.place_windows(point)
        for start in window_blocks(point, self._cache.spec.window_tokens):
            whole, ref = self._spans[start // BLOCK_TOKENS], self._available.windows[start]
            span = whole.in_group(self._salt, CacheGroup.WINDOW)
            views = self._cache.places(span.start, span.end, CacheGroup.WINDOW)
            if not self._read(ref, span, views):
                del self._available.windows[start]
                return False
        return True

    def _load_state(self, point: int) -> bool:
        ref = self._available.states.get(point)
        if ref is None:
            return True
        span = self._store.state_span(self._tenant, self._ids, self._spans, point)
        if not self._read(ref, span, self._cache.state_views()):
            del self._available.states[point]
            return False
        return True

    def _read(self, ref: BlockRef, span: BlockSpan, views: Sequence[Place | memoryview]) -> bool:
        """Read one block, which must be the very one that its place asks for."""
        if not span.names(ref):
            return False
        if self._cancel is not None and self._cancel.is_set():
            return False
        tokens = self._ids[span.start : span.end]
        try:
            self._store.blocks.load_into(ref, span.parent, tokens, views)
        except CorruptDataError as error:
            _log.warning("block at token %d is a miss: %s", span.start, error.message)
            if not isinstance(error, BlockMissingError) and not self._is_suspect:
                # What damaged one may have damaged more. Found now, all of it is computed and
                # saved again by this turn; found later, each would cost a turn of its own.
                self._is_suspect = True
                self._store.blocks.verify(self._available.refs())
            return False
        return True
