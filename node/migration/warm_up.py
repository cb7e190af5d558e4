"""Memory of agents on their way in, made resident while they still run elsewhere.

    copy ──▶ full blocks read ──▶ copy ──▶ more ──▶ final copy ──▶ the rest ──▶ commit: hot
                    the source goes on decoding      │        sealed        │

A stream that moves is silent between its last token there and its next one here. So what has
come is read back while the source still decodes, and only the end is left for the silence.
What is read here is a guess: a move that comes to nothing, or memory that is wanted, drops it.
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
from node.migration.incoming import IncomingMove, IncomingMoves
from node.migration.warm_cache import WarmCache
from node.mlx.resident_cache import ResidentCache
from node.runtime.health import Health
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.hot_tier import HotTier
from node.tiers.restore import load_layout, load_parts


class WarmUp:
    """Caches of moves to one node; lives on its event loop."""

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
        """Say whether anything of that move is held."""
        move = self._moves.get(name)
        return move is not None and move.warm is not None

    @property
    def size_bytes(self) -> int:
        """Memory held by those that nothing is read into."""
        return sum(move.warm.size_bytes for move in self._moves if move.warm is not None)

    async def extend(self, name: MigrationId, record: Manifest) -> None:
        """Read what is new of a record whose blocks are all here."""
        if not self._health.reuses:
            self.drop(name)
            return
        known = self._moves.get(name)
        warm = known.warm if known is not None else None
        if warm is None or not warm.begins(record):
            self.drop(name)
            warm = WarmCache(Reservation(self._engine.budget))
        move = self._moves.of(name)
        move.loading.append(warm)
        warm.reservation.count(warm.size_bytes)
        move.warm = None
        self._tell()
        try:
            if await self._fit(warm, record.tokens_count) and await self._read(warm, record):
                self._keep(move, warm)
        finally:
            move.loading.remove(warm)
            self._moves.tidy(move)
            self._tell()
            warm.reservation.release()
            self._engine.wake()

    def take(self, name: MigrationId, record: Manifest) -> ResidentCache | None:
        """Return a cache that holds exactly the record's tokens, if there is one."""
        warm = self._drop(name)
        self._tell()
        if warm is None or warm.tokens_count != record.tokens_count:
            return None
        return warm.cache

    def drop(self, name: MigrationId) -> None:
        """Forget what is held of a move."""
        if self._drop(name) is not None:
            self._tell()

    def clear(self) -> None:
        """Give all memory back; the moves go on without it."""
        for move in self._moves:
            _cancel(move.loading)
            move.warm = None
            self._moves.tidy(move)
        self._tell()

    def _drop(self, name: MigrationId) -> WarmCache | None:
        move = self._moves.get(name)
        if move is None:
            return None
        _cancel(move.loading)
        warm, move.warm = move.warm, None
        self._moves.tidy(move)
        return warm

    def _tell(self) -> None:
        """Tell the engine whether a stream may be on its way, and what memory it has here."""
        self._engine.moving.are_coming = any(move.warm or move.loading for move in self._moves)
        self._hot.note()

    async def _fit(self, warm: WarmCache, tokens_count: int) -> bool:
        """Make room for so many tokens; say whether there is any."""
        if warm.cache is not None and tokens_count <= warm.room_tokens:
            return True
        warm.room_tokens = room = tokens_count + ROOM_TOKENS
        if not self._reserve(warm):
            return False
        engine, known = self._engine, warm.cache

        def make() -> ResidentCache:
            if known is None:
                made = engine.engine.new_cache(room)
                made.keeps_slid = True
                return made
            known.reserve(room)
            known.settle()
            return known

        warm.cache = await engine.between_steps(make)
        return True

    def _reserve(self, warm: WarmCache) -> bool:
        """Take memory from idle caches that are worth less; never from one that is at work."""
        reservation = warm.reservation
        size_bytes = self._store.spec.resident_bytes(warm.room_tokens)
        free_bytes = self._hot.room_bytes - self.size_bytes
        more_bytes = size_bytes - reservation.size_bytes
        if more_bytes > free_bytes:
            return False
        self._hot.drop_resident(free_bytes - more_bytes)
        return reservation.claim(size_bytes)  # what is left may not be dropped

    async def _read(self, warm: WarmCache, record: Manifest) -> bool:
        """Read what is not in the cache yet; say whether that is worth keeping."""
        store, cache, cancel, head = self._store, warm.cache, warm.cancel, record.edited
        loaded, count = warm.full.tokens_count, record.tokens_count
        is_last = record.state is OwnerState.SEALED
        assert cache is not None, "made where there is room"
        head_tokens = head.tokens_count if head is not None else 0
        # The last part of a block grows with the next turn, and is another block then.
        end = count if is_last else count - (count - head_tokens) % BLOCK_TOKENS

        def read() -> int:
            ids, layout = record.token_ids, store.layout_to_read(record).cut(end)
            load = load_layout if is_last else load_parts
            good = load(store, record.tenant, ids, layout, cache, loaded, cancel=cancel)
            return good.tokens_count

        try:
            read_tokens = await self._workers.run(read)
        except CorruptDataError:  # what follows it says so
            return False
        warm.full = record.pieces.slice(0, read_tokens)
        warm.tokens_count = read_tokens if is_last else 0
        return not cancel.is_set() and (read_tokens == end or not is_last)

    def _keep(self, move: IncomingMove, warm: WarmCache) -> None:
        move.warm, warm.kept_as = warm, next(self._kept)
        held = [(each.warm.kept_as, each) for each in self._moves if each.warm is not None]
        for _, oldest in sorted(held, key=lambda pair: pair[0])[:-WARM_UPS_MAX]:
            oldest.warm = None
            self._moves.tidy(oldest)


def _cancel(loading: Iterable[WarmCache]) -> None:
    for warm in loading:
        warm.cancel.set()
