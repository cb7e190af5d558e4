"""Caches of arriving agents, loaded into memory while they still run on the source.

    copy ──▶ full blocks read ──▶ copy ──▶ more ──▶ final copy ──▶ the rest ──▶ commit: hot
                  the source continues decoding      │        sealed        │

A moving stream pauses between its last token there and its next one here. So blocks that have
arrived are loaded while the source still decodes, and only the end is left for the pause. This
is speculative: an aborted move, or a need for memory, drops it.
"""

import itertools
from collections.abc import Iterable

from fabric.errors import CorruptDataError
from fabric.ids import MigrationId
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import Manifest, OwnerState
from node.engine.engine_thread import EngineThread
from node.engine.memory_budget import Reservation
from node.limits import ROOM_TOKENS, WARM_UPS_MAX
from node.migration.incoming import IncomingMove, IncomingMoves, WarmCache
from node.mlx.resident_cache import ResidentCache
from node.runtime.health import Health
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.hot_tier import HotTier
from node.tiers.restore import load_layout, load_parts


class WarmUp:
    """Warm caches of incoming moves; used on the event loop."""

    def __init__(
        self,
        moves: IncomingMoves,
        store: AgentStore,
        workers: Workers,
        engine: EngineThread,
        hot: HotTier,
        health: Health,
    ) -> None:
        self._moves = moves
        self._store = store
        self._workers = workers
        self._engine = engine
        self._hot = hot
        self._health = health
        self._kept = itertools.count()

    def __contains__(self, name: MigrationId) -> bool:
        """Return whether a move has a warm cache."""
        move = self._moves.get(name)
        return move is not None and move.warm is not None

    @property
    def size_bytes(self) -> int:
        """Bytes of warm caches, except those that blocks are being read into."""
        return sum(move.warm.size_bytes for move in self._moves if move.warm is not None)

    async def extend(self, name: MigrationId, record: Manifest) -> None:
        """Load the new blocks of a record, whose blocks are all stored here."""
        if not self._health.reuses:
            self.drop(name)
            return
        incoming = self._moves.get(name)
        warm = incoming.warm if incoming is not None else None
        if warm is None or not warm.begins(record):
            self.drop(name)
            warm = WarmCache(Reservation(self._engine.budget))
        move = self._moves.get_or_create(name)
        move.loading.append(warm)
        warm.reservation.count(warm.size_bytes)
        move.warm = None
        self._notify_engine()
        try:
            if await self._fit(warm, record.tokens_count) and await self._read(warm, record):
                self._keep(move, warm)
        finally:
            move.loading.remove(warm)
            self._moves.discard_if_empty(move)
            self._notify_engine()
            warm.reservation.release()
            self._engine.wake()

    def take(self, name: MigrationId, record: Manifest) -> ResidentCache | None:
        """Remove and return the cache that holds exactly the record's tokens, or None."""
        warm = self._drop(name)
        self._notify_engine()
        if warm is None or warm.tokens_count != record.tokens_count:
            return None
        return warm.cache

    def drop(self, name: MigrationId) -> None:
        """Drop the cache of a move."""
        if self._drop(name) is not None:
            self._notify_engine()

    def clear(self) -> None:
        """Drop all caches; the moves continue without them."""
        for move in self._moves:
            _cancel(move.loading)
            move.warm = None
            self._moves.discard_if_empty(move)
        self._notify_engine()

    def _drop(self, name: MigrationId) -> WarmCache | None:
        move = self._moves.get(name)
        if move is None:
            return None
        _cancel(move.loading)
        warm, move.warm = move.warm, None
        self._moves.discard_if_empty(move)
        return warm

    def _notify_engine(self) -> None:
        """Notify the engine whether streams are arriving, and the hot tier of a changed size."""
        self._engine.moving.are_coming = any(move.warm or move.loading for move in self._moves)
        self._hot.note()

    async def _fit(self, warm: WarmCache, tokens_count: int) -> bool:
        """Reserve memory for `tokens_count` tokens; return whether there is enough."""
        if warm.cache is not None and tokens_count <= warm.room_tokens:
            return True
        warm.room_tokens = room = tokens_count + ROOM_TOKENS
        if not self._reserve(warm):
            return False
        engine, known = self._engine, warm.cache

        def make() -> ResidentCache:
            if known is None:
                cache = engine.engine.new_cache(room)
                cache.keeps_slid = True
                return cache
            known.reserve(room)
            known.settle()
            return known

        warm.cache = await engine.between_steps(make)
        return True

    def _reserve(self, warm: WarmCache) -> bool:
        """Reserve memory, dropping idle caches that are worth less, but none in use."""
        reservation = warm.reservation
        size_bytes = self._store.spec.resident_bytes(warm.room_tokens)
        free_bytes = self._hot.room_bytes - self.size_bytes
        more_bytes = size_bytes - reservation.size_bytes
        if more_bytes > free_bytes:
            return False
        self._hot.drop_resident(free_bytes - more_bytes)
        return reservation.claim(size_bytes)  # the rest may not be dropped

    async def _read(self, warm: WarmCache, record: Manifest) -> bool:
        """Load the blocks that the cache lacks; return whether the cache is worth keeping."""
        store, cache, cancel, head = self._store, warm.cache, warm.cancel, record.edited
        loaded, count = warm.full.tokens_count, record.tokens_count
        is_last = record.state is OwnerState.SEALED
        assert cache is not None, "created when memory was reserved"
        head_tokens = head.tokens_count if head is not None else 0
        # A partial block grows with the next turn, and is another block then.
        end = count if is_last else count - (count - head_tokens) % BLOCK_TOKENS

        def read() -> int:
            ids, layout = record.token_ids, store.layout_to_read(record).cut(end)
            load = load_layout if is_last else load_parts
            good = load(store, record.tenant, ids, layout, cache, loaded, cancel=cancel)
            return good.tokens_count

        try:
            read_tokens = await self._workers.run(read)
        except CorruptDataError:  # the turn restores, and reports it
            return False
        warm.full = record.pieces.slice(0, read_tokens)
        warm.tokens_count = read_tokens if is_last else 0
        return not cancel.is_set() and (read_tokens == end or not is_last)

    def _keep(self, move: IncomingMove, warm: WarmCache) -> None:
        move.warm, warm.kept_as = warm, next(self._kept)
        warm_moves = [
            (other.warm.kept_as, other) for other in self._moves if other.warm is not None
        ]
        for _, oldest in sorted(warm_moves, key=lambda pair: pair[0])[:-WARM_UPS_MAX]:
            oldest.warm = None
            self._moves.discard_if_empty(oldest)


def _cancel(loading: Iterable[WarmCache]) -> None:
    for warm in loading:
        warm.cancel.set()
