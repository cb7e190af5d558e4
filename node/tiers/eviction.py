"""Eviction of agents from a node, or of their old states.

All of it happens under the agents' turn locks. The record goes first and durably, then what
no other record refers to: a crash in between leaves blocks that recovery removes.
"""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from fabric.errors import FabricError
from fabric.ids import AgentKey
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.stored_part import trim_restore_points
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.limits import EVICTIONS_MAX
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.posix_disk import DiskError
from node.tiers.hot_tier import HotTier
from node.transfer.offer_book import OfferBook

_log = logging.getLogger(__name__)


def is_active(agent: Agent, offered: AbstractSet[AgentKey]) -> bool:
    """Return whether an agent must stay: at work, offered to another node, or not saved."""
    return (
        agent.is_busy
        or agent.is_unsaved
        or agent.manifest.state is OwnerState.SEALED
        or agent.key in offered
    )


@dataclass(frozen=True, slots=True)
class Eviction:
    """Evicts a node's agents, or shrinks them."""

    table: AgentTable
    store: AgentStore
    workers: Workers
    offers: OfferBook
    hot: HotTier

    async def evict(self, chosen: Sequence[Agent]) -> int:
        """Evict agents with their records and caches; count them. Raise DiskError.

        Agents that became active in the meantime stay.
        """
        count = 0
        for start in range(0, len(chosen), EVICTIONS_MAX):
            count += await self._evict_some(chosen[start : start + EVICTIONS_MAX])
        return count

    async def _evict_some(self, chosen: Sequence[Agent]) -> int:
        table, offered = self.table, self.offers.agents()
        idle = [a for a in chosen if table.get(a.key) is a and not is_active(a, offered)]
        for agent in idle:
            await agent.turn_lock.acquire()  # at once, since it is free
        try:
            evicted = await self._remove_records(idle)
            for agent in evicted:
                agent.cache, agent.was_evicted = None, True
                table.forget(agent)
        finally:
            for agent in idle:
                agent.turn_lock.release()
        self.hot.note()
        return len(evicted)

    async def _remove_records(self, agents: Sequence[Agent]) -> Sequence[Agent]:
        """Remove the records together, or else one by one; list the agents without a record."""

        async def remove(some: Sequence[Agent]) -> None:
            records = [agent.saved for agent in some if agent.saved is not None]
            await self.workers.run(lambda: self.store.evict(records))

        try:
            await remove(agents)
        except DiskError as failure:
            removed = []
            for agent in agents:
                with suppress(DiskError):
                    await remove([agent])
                    removed.append(agent)
            if not removed:
                raise failure from None
            return removed
        return agents

    async def drop_branches(self, agents: Sequence[Agent]) -> int:
        """Drop the superseded forms of idle agents; count these agents. Log a failing disk."""
        count, offered = 0, self.offers.agents()
        for agent in agents:
            record, current = agent.saved, agent.manifest
            if record is None or not record.branches or not agent.is_durable:
                continue
            if is_active(agent, offered) or self.table.get(agent.key) is not agent:
                continue
            smaller = replace(current, branches=None, revision=current.revision + 1)
            try:
                async with agent.turn_lock:
                    await self.workers.run(partial(self.store.publish, smaller, record))
                    agent.take_record(smaller)
                    self.table.put(agent)
                    count += 1
            except (FabricError, OSError) as error:
                _log.warning("cannot drop the branches of an agent: %s", error)
        return count

    async def trim(self, agent: Agent) -> bool:
        """Drop an idle agent's old windows and states; return whether that was possible."""
        record = agent.saved
        if record is None or not agent.is_durable or agent.is_busy:
            return False
        smaller = trimmed(agent.manifest, self.store.spec.window_tokens)
        if smaller is None or self.store.missing(smaller):
            return False
        async with agent.turn_lock:
            await self.workers.run(lambda: self.store.publish(smaller, record))
            agent.take_record(smaller)
            self.table.put(agent)
        return True


def trimmed(record: Manifest, window_tokens: int) -> Manifest | None:
    """Return the record without windows and states of earlier points; None if it has none."""
    least = trim_restore_points(record, window_tokens)
    is_trimmed = (least.windows, least.states) == (record.windows, record.states)
    return None if is_trimmed else replace(least, revision=record.revision + 1)
