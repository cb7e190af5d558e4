"""Memory of agents on their way in, made resident while they still run elsewhere.

    copy ──▶ full blocks read ──▶ copy ──▶ more ──▶ final copy ──▶ the rest ──▶ commit: hot
                    the source goes on decoding      │        sealed        │

A stream that moves is silent between its last token there and its next one here. So what has
come is read back while the source still decodes, and only the end is left for the silence.
What is read here is a guess: a move that comes to nothing, or memory that is wanted, drops it.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fabric.ids import MigrationId
from fabric.kvcache.block import BlockRef
from fabric.limits import ARRIVALS_MAX, BLOCK_TOKENS
from fabric.record.manifest import Manifest, OwnerState
from node.engine.memory_budget import Reservation
from node.mlx.resident_cache import ResidentCache
from node.store.stock import stock_of
from node.tiers.restore import load_blocks, load_full_blocks
from node.turn.prefix import ROOM_TOKENS

if TYPE_CHECKING:
    from node.node import Node


@dataclass(slots=True, eq=False)
class Arrival:
    """One agent's cache as far as it is here.

    While it is read into, its memory is reserved and may not be dropped; `cancel` ends that
    after the block that is being read.
    """

    migration: MigrationId
    reservation: Reservation
    cache: ResidentCache | None = None
    room_tokens: int = 0
    refs: list[BlockRef] = field(default_factory=list)  # the full blocks in it, in order
    tokens_count: int = 0  # once all of the final record is in it
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return self.cache.size_bytes if self.cache is not None else 0

    def begins(self, refs: list[BlockRef]) -> bool:
        """Say whether its blocks are the first of `refs`."""
        return refs[: len(self.refs)] == self.refs


class Arrivals:
    """Caches of running moves, on the node's event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._held: dict[MigrationId, Arrival] = {}
        self._loading: list[Arrival] = []

    def __contains__(self, migration: MigrationId) -> bool:
        """Say whether anything of that move is held."""
        return migration in self._held

    @property
    def size_bytes(self) -> int:
        """Memory held by those that nothing is read into."""
        return sum(arrival.size_bytes for arrival in self._held.values())

    async def extend(self, migration: MigrationId, record: Manifest) -> None:
        """Read what is new of a record whose blocks are all here."""
        node = self._node
        if not node.reuses:
            self.drop(migration)
            return
        arrival = self._held.get(migration)
        if arrival is None or not arrival.begins(stock_of(record).full):
            self.drop(migration)
            arrival = Arrival(migration, Reservation(node.engine.budget))
        self._loading.append(arrival)
        arrival.reservation.count(arrival.size_bytes)
        self._held.pop(migration, None)
        self._tell()
        try:
            if await self._fit(arrival, record.tokens_count) and await self._read(arrival, record):
                self._keep(arrival)
        finally:
            self._loading.remove(arrival)
            self._tell()
            arrival.reservation.release()
            node.engine.wake()

    def take(self, migration: MigrationId, record: Manifest) -> ResidentCache | None:
        """Return a cache that holds exactly the record's tokens, if there is one."""
        self._cancel(each for each in self._loading if each.migration == migration)
        arrival = self._held.pop(migration, None)
        self._tell()
        if arrival is None or arrival.tokens_count != record.tokens_count:
            return None
        return arrival.cache

    def drop(self, migration: MigrationId) -> None:
        """Forget a move."""
        self._cancel(each for each in self._loading if each.migration == migration)
        if self._held.pop(migration, None) is not None:
            self._tell()

    def clear(self) -> None:
        """Give all memory back; the moves go on without it."""
        self._cancel(self._loading)
        self._held.clear()
        self._tell()

    def _tell(self) -> None:
        """Tell the engine whether a stream may be on its way, and what memory it has here."""
        self._node.engine.moving.are_coming = bool(self._held or self._loading)
        self._node.note_hot()

    def _cancel(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            arrival.cancel.set()

    async def _fit(self, arrival: Arrival, tokens_count: int) -> bool:
        """Make room for so many tokens; say whether there is any."""
        if arrival.cache is not None and tokens_count <= arrival.room_tokens:
            return True
        arrival.room_tokens = room = tokens_count + ROOM_TOKENS
        if not self._reserve(arrival):
            return False
        engine, known = self._node.engine, arrival.cache

        def make() -> ResidentCache:
            if known is None:
                made = engine.engine.new_cache(room)
                made.keeps_slid = True
                return made
            known.reserve(room)
            known.settle()
            return known

        arrival.cache = await self._node.on_engine(make)
        return True

    def _reserve(self, arrival: Arrival) -> bool:
        """Take memory from idle caches that are worth less; never from one that is at work."""
        node, reservation = self._node, arrival.reservation
        size_bytes, budget = node.spec.resident_bytes(arrival.room_tokens), node.engine.budget
        free_bytes = min(node.settings.hot_bytes, budget.claimable_bytes) - self.size_bytes
        more_bytes = size_bytes - reservation.size_bytes
        if more_bytes > free_bytes:
            return False
        node.table.cool(free_bytes - more_bytes)
        node.note_hot()
        return reservation.claim(size_bytes)  # what is left may not be dropped

    async def _read(self, arrival: Arrival, record: Manifest) -> bool:
        """Read what is not in the cache yet; say whether that is worth keeping."""
        node, stock, cache, cancel = self._node, stock_of(record), arrival.cache, arrival.cancel
        ids, tenant, loaded = record.token_ids, record.tenant, len(arrival.refs)
        assert cache is not None, "made where there is room"
        if record.state is OwnerState.SEALED:
            count = record.tokens_count
            point = await node.in_worker(
                lambda: load_blocks(
                    node.store, tenant, ids, stock, count, cache, loaded, cancel=cancel
                )
            )
            if point == count:
                cache.assume(count)
                arrival.tokens_count = count
            # Less is good than should be, or wanted: then the turn restores, and says so.
            return point == count and not cancel.is_set()
        stock.full = [ref for ref in stock.full if ref.tokens_count == BLOCK_TOKENS]
        loaded = await node.in_worker(
            lambda: load_full_blocks(node.store, tenant, ids, stock, cache, loaded, cancel=cancel)
        )
        arrival.refs = stock.full[:loaded]
        return not cancel.is_set()

    def _keep(self, arrival: Arrival) -> None:
        self._held[arrival.migration] = arrival
        while len(self._held) > ARRIVALS_MAX:
            self._held.pop(next(iter(self._held)))
