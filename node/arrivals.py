"""Memory of agents on their way in, made resident while they still run elsewhere.

    copy ──▶ full blocks read ──▶ copy ──▶ more ──▶ final copy ──▶ the rest ──▶ commit: hot
                    the source goes on decoding      │        sealed        │

A stream that moves is silent between its last token there and its next one here. So what has
come is read back while the source still decodes, and only the end is left for the silence.
What is read here is a guess: a move that comes to nothing, or memory that is wanted, drops it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric.block import BlockRef
from fabric.ids import MigrationId
from fabric.limits import ARRIVALS_MAX, BLOCK_TOKENS
from fabric.manifest import Manifest, OwnerState
from node.agent_store import stock_of
from node.mlx.resident_cache import ResidentCache
from node.prefix import ROOM_TOKENS

if TYPE_CHECKING:
    from node.node import Node


@dataclass(slots=True, eq=False)
class Arrival:
    """One agent's cache as far as it is here."""

    cache: ResidentCache
    room_tokens: int
    refs: list[BlockRef]  # the full blocks in it, in order
    tokens_count: int = 0  # once all of the final record is in it

    def begins(self, refs: list[BlockRef]) -> bool:
        """Say whether its blocks are the first of `refs`."""
        return refs[: len(self.refs)] == self.refs


class Arrivals:
    """Caches of running moves, on the node's event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._held: dict[MigrationId, Arrival] = {}

    def __contains__(self, migration: MigrationId) -> bool:
        """Say whether anything of that move is held."""
        return migration in self._held

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(arrival.cache.size_bytes for arrival in self._held.values())

    async def extend(self, migration: MigrationId, record: Manifest) -> None:
        """Read what is new of a record whose blocks are all here."""
        node, stock = self._node, stock_of(record)
        arrival = self._held.pop(migration, None)
        if arrival is None or not arrival.begins(stock.full):
            arrival = await self._begin(record)
        if arrival is None:
            return
        await self._fit(arrival, record.tokens_count)
        cache, ids, tenant = arrival.cache, record.token_ids, record.tenant
        loaded = len(arrival.refs)
        if record.state is OwnerState.SEALED:
            count = record.tokens_count
            point = await node.in_worker(
                lambda: node.store.load(tenant, ids, stock, count, cache, loaded)
            )
            if point != count:
                return  # less is good than it should be: the turn restores, and says so
            cache.assume(count)
            arrival.tokens_count = count
        else:
            stock.full = [ref for ref in stock.full if ref.tokens_count == BLOCK_TOKENS]
            loaded = await node.in_worker(
                lambda: node.store.load_full(tenant, ids, stock, cache, loaded)
            )
            arrival.refs = stock.full[:loaded]
        self._keep(migration, arrival)

    def take(self, migration: MigrationId, record: Manifest) -> ResidentCache | None:
        """Return a cache that holds exactly the record's tokens, if there is one."""
        arrival = self._held.pop(migration, None)
        if arrival is None or arrival.tokens_count != record.tokens_count:
            return None
        return arrival.cache

    def drop(self, migration: MigrationId) -> None:
        """Forget a move."""
        if self._held.pop(migration, None) is not None:
            self._node.note_hot()

    def clear(self) -> None:
        """Give all memory back; the moves go on without it."""
        self._held.clear()

    async def _begin(self, record: Manifest) -> Arrival | None:
        node = self._node
        room = record.tokens_count + ROOM_TOKENS
        size_bytes, budget = node.spec.resident_bytes(room), node.engine.budget
        free_bytes = min(node.settings.hot_bytes, budget.claimable_bytes) - self.size_bytes
        if not node.reuses or size_bytes > free_bytes:
            return None
        node.table.cool(free_bytes - size_bytes)
        node.note_hot()
        if budget.idle_bytes + size_bytes > budget.claimable_bytes:
            return None  # what is left may not be dropped
        cache = await node.on_engine(lambda: node.engine.engine.new_cache(room))
        cache.keeps_slid = True
        return Arrival(cache, room, [])

    async def _fit(self, arrival: Arrival, tokens_count: int) -> None:
        if tokens_count > arrival.room_tokens:
            arrival.room_tokens = room = tokens_count + ROOM_TOKENS

            def grow() -> None:
                arrival.cache.reserve(room)
                arrival.cache.settle()

            await self._node.on_engine(grow)

    def _keep(self, migration: MigrationId, arrival: Arrival) -> None:
        self._held[migration] = arrival
        while len(self._held) > ARRIVALS_MAX:
            self._held.pop(next(iter(self._held)))
        self._node.note_hot()
