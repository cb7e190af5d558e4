"""Derived memory: drop the rows that agents computed from rows of an erased one.

lender    [ erased                 ]
borrower  [ its own )[ borrowed )[ computed after them )
left      [ its own )
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from fabric.errors import FabricError
from fabric.ids import TenantId
from fabric.record.lenders import Lender
from fabric.record.stored_part import truncate_before_edits
from node.agents.agent import Agent
from node.limits import RECORD_WRITE_POLLS_MAX
from node.store.tombstones import TombstoneStore
from node.tiers.agent_records import AgentRecords
from node.tiers.prefetch import Prefetches

_log = logging.getLogger(__name__)
WRITE_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class DroppedMemory:
    """Memory of other agents that an erasure dropped."""

    agents: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class DerivedMemory:
    """Rows of one node's agents that came from other agents; used on the event loop."""

    records: AgentRecords
    erased: TombstoneStore
    prefetches: Prefetches
    # By tenant and lender: what was dropped since its erasure began, by this call or another.
    counts: dict[tuple[TenantId, str], DroppedMemory] = field(default_factory=dict)

    def begin_count(self, tenant: TenantId, lender: str) -> None:
        """Count the memory of one lender that is dropped until `end_count`."""
        self.counts[tenant, lender] = DroppedMemory()

    def end_count(self, tenant: TenantId, lender: str) -> DroppedMemory:
        """Return the memory dropped since `begin_count`."""
        return self.counts.pop((tenant, lender), DroppedMemory())

    def _note(self, tenant: TenantId, lenders: Iterable[Lender], tokens: int) -> None:
        names = {lender.agent for lender in lenders}
        is_any = any(lender.is_any for lender in lenders)
        for key, count in self.counts.items():
            if key[0] == tenant and (is_any or key[1] in names):
                self.counts[key] = DroppedMemory(count.agents + 1, count.tokens + tokens)

    async def drop(self, tenant: TenantId | None = None) -> DroppedMemory:
        """Drop rows that came from erased agents; at the end, raise the first error of the disk."""
        agents = tokens = 0
        refused: list[Exception] = []
        for agent in list(self.records.table):
            if tenant in (None, agent.key[0]) and await self._will_be_derived(agent):
                lenders = agent.lenders
                try:
                    count = await self._drop(agent)
                except (FabricError, OSError) as error:
                    refused.append(error)
                    continue
                if count:
                    self._note(agent.key[0], lenders, count)
                agents, tokens = agents + (count > 0), tokens + count
        if refused:
            raise refused[0]
        return DroppedMemory(agents, tokens)

    async def _will_be_derived(self, agent: Agent) -> bool:
        """Return whether an agent has derived memory; wait for a record that is being written.

        That write may have checked for erasures before this one. A turn needs no wait: it checks
        again at its end.
        """
        for _ in range(RECORD_WRITE_POLLS_MAX):
            if self._is_derived(agent):
                return True
            if agent.turn is not None or not agent.turn_lock.locked():
                return False
            await asyncio.sleep(WRITE_POLL_S)
        return self._is_derived(agent)

    def _is_derived(self, agent: Agent) -> bool:
        lenders = agent.lenders
        return bool(lenders) and self.erased.has_erased_lender(agent.key[0], lenders)

    async def _drop(self, agent: Agent) -> int:
        """Drop one agent's derived memory; return the number of dropped tokens."""
        records, table = self.records, self.records.table
        if agent.turn is not None:
            agent.turn.cancel()
        await self.prefetches.stop(agent)
        async with agent.turn_lock:
            if table.get(agent.key) is not agent or not self._is_derived(agent):
                return 0
            agent.cache = None
            manifest, saved = agent.manifest, agent.saved
            if saved is None:  # the record was in memory only
                agent.was_evicted = True
                table.remove(agent.key)
                return manifest.tokens_count
            record = truncate_before_edits(saved)
            count = max(manifest.tokens_count, saved.tokens_count) - record.tokens_count
            record = replace(
                record, epoch=manifest.epoch, owner=manifest.owner, state=manifest.state
            )
            await records.republish(agent, record)
            assert agent.saved is not None, "it was just published"
            agent.note_saved(agent.saved, ())
            records.hot.note()
            return count
