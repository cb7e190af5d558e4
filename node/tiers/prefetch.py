"""Prefetch: load an agent from disk ahead of its turn, without taking memory from running turns.

prefetch ─▶ room among idle caches? ─▶ load ─▶ hot          a turn that arrives
                   └ no: refused          └ cancelled       waits for the load
"""

import asyncio
import threading

from fabric.control.node_calls import AgentView, PrefetchAgent
from fabric.errors import ConflictError, CorruptDataError, OverloadedError, RetryLaterError
from fabric.record.manifest import Manifest, OwnerState
from node.agents.agent import Agent, Loading
from node.agents.owned import OwnedAgents
from node.engine.engine_thread import EngineThread
from node.engine.memory_budget import Reservation
from node.limits import PREFETCHES_MAX, ROOM_TOKENS
from node.mlx.resident_cache import ResidentCache
from node.runtime.health import Health
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.hot_tier import HotTier
from node.tiers.restore import Restores


class Prefetches:
    """Prefetcher of a node's agents; used on its event loop."""

    def __init__(
        self,
        owned: OwnedAgents,
        store: AgentStore,
        workers: Workers,
        restores: Restores,
        engine: EngineThread,
        hot: HotTier,
        health: Health,
    ) -> None:
        self._owned = owned
        self._store = store
        self._workers = workers
        self._restores = restores
        self._engine = engine
        self._hot = hot
        self._health = health
        self._loadings: dict[Loading, None] = {}
        self._guesses: set[Loading] = set()  # speculative loads, which no client has requested
        hot.count(self)

    @property
    def size_bytes(self) -> int:
        """Zero idle memory, since a load has reserved the memory that it fills."""
        return 0

    def clear(self) -> None:
        """Cancel speculative loads, since a turn lacks memory."""
        for loading in self._guesses:
            loading.cancel.set()

    async def answer(self, call: PrefetchAgent) -> AgentView:
        """Load the agent, or cancel a load; return the agent's view."""
        if call.cancel:
            agent = self._owned.table.require(call.key)
            await self.stop(agent)
            return agent.view()
        agent = self._owned.require(call.key, call.epoch)
        if agent.loading is None and agent.cache is None and not agent.is_busy:
            if call.is_guess and self._engine.unplaced_count:
                message = "turns wait for this node, so it loads no agent speculatively"
                raise OverloadedError(message, code="turns_wait")
            self._begin(agent)
            if call.is_guess and agent.loading is not None:
                self._guesses.add(agent.loading)
        if agent.loading is not None:
            await asyncio.shield(agent.loading.task)
        return agent.view()

    async def join(self, agent: Agent) -> None:
        """Wait for a load in progress, whose cache the calling turn needs."""
        if agent.loading is not None:
            self._guesses.discard(agent.loading)  # a turn needs it now
            await asyncio.wait([agent.loading.task])

    async def stop(self, agent: Agent) -> None:
        """Cancel a running load, and wait until it has released its memory."""
        if agent.loading is not None:
            agent.loading.cancel.set()
            await asyncio.wait([agent.loading.task])

    async def close(self) -> None:
        """Cancel all running loads."""
        for loading in self._loadings:
            loading.cancel.set()
        await asyncio.gather(*(loading.task for loading in self._loadings), return_exceptions=True)

    def _begin(self, agent: Agent) -> None:
        record = agent.saved
        if (
            record is None
            or not agent.is_durable
            or not record.token_ids
            or not self._health.reuses
        ):
            message = "the agent has no saved turn on disk"
            raise ConflictError(message, code="nothing_saved")
        if len(self._loadings) >= PREFETCHES_MAX:
            message = f"{PREFETCHES_MAX} agents are being prefetched already"
            raise OverloadedError(message)
        reservation = self._reserve(record)
        cancel = threading.Event()
        task = asyncio.create_task(self._run(agent, record, reservation, cancel))
        # A waiting caller gets the error; retrieve it in case no caller waits any more.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        agent.loading = Loading(task, cancel)
        self._loadings[agent.loading] = None

    def _reserve(self, record: Manifest) -> Reservation:
        """Reserve memory, freeing less valuable idle caches but none of a running turn."""
        size_bytes = self._store.spec.resident_bytes(record.tokens_count + ROOM_TOKENS)
        budget = self._engine.budget
        self._hot.drop_resident(self._hot.room_bytes - size_bytes)
        reservation = Reservation(budget)
        if not reservation.claim(size_bytes):
            message = f"no memory is free for {size_bytes} bytes besides what running turns use"
            raise RetryLaterError(message, code="no_room")
        return reservation

    async def _run(
        self,
        agent: Agent,
        record: Manifest,
        reservation: Reservation,
        cancel: threading.Event,
    ) -> None:
        refs, blocks = record.refs, self._store.blocks
        blocks.hold(refs)  # missing blocks show up when they are read
        try:
            cache = await self._load(record, cancel)
            if cache is not None:
                self._install(agent, record, cache)
        finally:
            assert agent.loading is not None, "set before this runs"
            self._loadings.pop(agent.loading, None)
            self._guesses.discard(agent.loading)
            agent.loading = None
            reservation.release()
            self._hot.note()
            self._engine.wake()
            blocks.release(refs)
            await self._workers.run(self._store.sweep)
        if cache is None:
            why = "was cancelled" if cancel.is_set() else "found blocks that are lost"
            message = f"the prefetch {why}"
            raise ConflictError(message, code="cancelled" if cancel.is_set() else "blocks_missing")

    async def _load(self, record: Manifest, cancel: threading.Event) -> ResidentCache | None:
        """Read a whole record; return None if blocks are lost or the load was cancelled."""
        count, ids = record.tokens_count, list(record.token_ids)
        engine, room_tokens = self._engine, count + ROOM_TOKENS
        cache = await engine.between_steps(lambda: engine.engine.new_cache(room_tokens))
        cache.keeps_slid = self._health.reuses
        try:
            layout = await self._workers.run(lambda: self._store.layout_to_read(record))
        except CorruptDataError:
            return None
        await self._restores.read(record.tenant, ids, layout, cache, cancel)
        if cache.tokens_count != len(ids):
            return None
        await engine.between_steps(cache.rest)
        return cache

    def _install(self, agent: Agent, record: Manifest, cache: ResidentCache) -> None:
        """Install the cache unless the agent has changed or been removed since."""
        table = self._owned.table
        is_same = table.get(agent.key) is agent and agent.cache is None and agent.is_durable
        owned = agent.effective_record.state is OwnerState.OWNED
        if is_same and owned and agent.manifest.token_ids is record.token_ids:
            agent.cache = cache
            agent.stored_tokens = record.tokens_count
            table.note_change(agent.key)
