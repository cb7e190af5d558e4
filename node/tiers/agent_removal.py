"""Removal of one erased agent from a node: its incoming blocks, its turn, its record."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fabric.ids import AgentKey
from fabric.kvcache.block import BlockRef
from node.agents.agent import Agent
from node.tiers.agent_records import AgentRecords
from node.tiers.derived_memory import DerivedMemory
from node.tiers.prefetch import Prefetches
from node.tiers.span_leases import SpanLeases
from node.transfer.offer_book import OfferBook


@dataclass(frozen=True, slots=True)
class AgentRemoval:
    """Removal of agents from a node; `forget_incoming` returns whether a move brought blocks."""

    records: AgentRecords
    offers: OfferBook
    prefetches: Prefetches
    forget_incoming: Callable[[AgentKey], Awaitable[bool]]
    leases: SpanLeases
    derived: DerivedMemory

    async def forget_moves(self, key: AgentKey) -> bool:
        """Drop the agent's incoming and offered blocks of moves whose router is gone."""
        self.offers.withdraw_agent(key)
        was_borrowed = self.leases.forget(key)
        return await self.forget_incoming(key) or was_borrowed

    def forget_borrowed(self) -> None:
        """Drop rows borrowed from erased agents of any node."""
        self.leases.forget_erased()

    async def remove(self, key: AgentKey, epoch: int) -> tuple[list[BlockRef], bool]:
        """Remove an agent and its record; return the blocks that these referred to."""
        records, table = self.records, self.records.table
        agent = table.get(key)
        if agent is None or agent.manifest.epoch > epoch:  # a later one of this name
            return [], False
        _end_turn(agent, epoch)
        await self.prefetches.stop(agent)
        async with agent.turn_lock:
            if table.get(key) is not agent or agent.manifest.epoch > epoch:
                return [], table.get(key) is None  # its first turn stored nothing
            # In the table until it is gone: a turn that starts now waits for the lock.
            saved, agent.cache = agent.saved, None
            refs = await records.workers.run(lambda: records.store.erase_record(key, saved))
            table.forget(agent)
        agent.outgoing.leave(epoch + 1)
        records.hot.note()
        return refs, True


def _end_turn(agent: Agent, epoch: int) -> None:
    """End a running turn, which could neither be saved nor acknowledged."""
    agent.outgoing.end(epoch)
    if agent.turn is not None:
        agent.turn.cancel()
