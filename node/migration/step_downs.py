"""Agents that this node gives up to another: in its word at once, on disk when that takes it.

    told ──▶ listed as a replica, its turn ends ──▶ the record says so, too
                                      └── the disk refuses, or the turn lasts: again in a while

Nobody else asks again: by its list this node has stepped down.
"""

import logging
from dataclasses import dataclass, replace

from fabric.errors import ConflictError, FabricError
from fabric.record.manifest import Manifest
from fabric.record.provenance import Provenance
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.agents.outgoing import Successor
from node.limits import FLUSH_FAILURES_MAX
from node.store.tombstones import TombstoneStore
from node.tiers.agent_records import AgentRecords

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepDowns:
    """Releases agents that a node no longer owns; used on its event loop."""

    records: AgentRecords
    erased: TombstoneStore

    def begin(self, agent: Agent, to: Successor) -> None:
        """Say from now on that the agent is another's; of one that is erased it tells nothing."""
        if self._is_erased(agent):
            agent.outgoing.leave(to.epoch)
        else:
            agent.outgoing.give_way(to)
            self.records.table.put(agent)

    async def finish(self, agent: Agent) -> None:
        """Write down that the agent is another's, under its turn lock.

        Raises DiskError, and ConflictError where nobody else has what is in memory only.
        """
        told = agent.successor
        if told is None or self._is_erased(agent) or not self.records.is_here(agent):
            return
        agent.outgoing.leave(told.epoch)  # a seal that was being written has ended since
        if _is_only_here(agent, told):
            message = "the agent is in memory only, and nobody else has it"
            raise ConflictError(message, code="cannot_release")
        await self.records.republish(agent, _left_behind(agent, told))
        agent.cache, agent.is_durable = None, True
        self.records.hot.note()

    def _is_erased(self, agent: Agent) -> bool:
        """Say whether it must not outlive its erasure at a later epoch."""
        return agent.manifest.epoch <= self.erased.floor(*agent.key)

    async def finish_all(self) -> None:
        """Write down what could not be written before; what fails again stays owed."""
        failures = 0
        for agent in self.records.table:
            told = agent.successor
            if told is None or agent.is_busy or _is_only_here(agent, told):
                continue
            async with agent.turn_lock:
                try:
                    await self.finish(agent)
                except (FabricError, OSError) as error:
                    _log.error("a record still claims an agent of another node: %s", error)
                    failures += 1
            if failures == FLUSH_FAILURES_MAX:
                break


def _is_only_here(agent: Agent, told: Successor) -> bool:
    return agent.is_unsaved and told.node == agent.manifest.owner


def _left_behind(agent: Agent, told: Successor) -> Manifest:
    """Return the replica's record: turns that are in memory only go, as their owner has others."""
    record = agent.manifest
    stored = record if agent.is_durable else agent.saved or _emptied(record)
    left = replace(stored, revision=record.revision + 1, pinned=record.pinned)
    return left.stepped_down(told.node, told.epoch)


def _emptied(record: Manifest) -> Manifest:
    """Return the record of an agent of which no block was saved: it fences, and holds nothing."""
    emptied = replace(record, text="", token_ids=U32s(), token_ends=U32s(), prompt_tokens_count=0)
    return replace(emptied, sketch=(), provenance=Provenance())
