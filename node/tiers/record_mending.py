"""Repair of an idle agent's record that lost blocks: save them from memory, or cut the record.

The agent's next turn would repair it too. A move, a copy or a pin cannot wait for that turn, so it
repairs the record first: one lost block must not keep the agent on this node.
"""

import logging
from dataclasses import dataclass, replace

from fabric.record.manifest import OwnerState
from fabric.record.stored_part import truncate_record
from node.agents.agent import Agent
from node.tiers.agent_records import AgentRecords, despite_losses
from node.tiers.record_writer import RecordWriters

MEND_WAIT_S = 8.0  # wait for a turn that holds the agent

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordMending:
    """Repairs records of a node's agents."""

    records: AgentRecords
    writers: RecordWriters

    async def repair(self, agent: Agent, *, verify: bool = False) -> None:
        """Repair the agent's record if it lost blocks; with `verify`, read all blocks to find out.

        Raises DiskError, or RetryLaterError if a turn of the agent does not end in time.
        """
        saved, store = agent.saved, self.records.store
        if saved is not None and verify:
            await self.records.verify(saved)
        if saved is None or not store.missing(saved):
            return
        async with agent.turn_lock.held(MEND_WAIT_S):
            if self.records.is_here(agent):
                await self.mend(agent)

    async def mend(self, agent: Agent, *, may_truncate: bool = True) -> bool:
        """Repair the record; the caller holds the turn lock. Return whether it is complete now.

        Raises DiskError.
        """
        return await despite_losses(lambda: self._mend(agent, may_truncate=may_truncate))

    async def _mend(self, agent: Agent, *, may_truncate: bool) -> bool:
        saved, cache, record = agent.saved, agent.cache, agent.manifest
        if saved is None or not agent.is_durable:
            return True  # the next save checks its blocks
        lost = await self.records.missing(saved)
        if not lost:
            return True
        later = replace(record, revision=record.revision + 1)
        if cache is not None and record.state is OwnerState.OWNED and record.token_ids:
            writer = self.writers.of_idle(agent, cache)
            mended = await writer.publish(later, record.tokens_count)
            agent.note_saved(mended, writer.spans)
        elif may_truncate:
            mended = truncate_record(later, set(lost))
            await self.records.publish(mended, saved)
            agent.cache, agent.stored_tokens = None, 0
            agent.take_record(mended)
        else:
            return False
        self.records.put(agent)
        _log.warning("an agent lost %d blocks; %d tokens are left", len(lost), mended.tokens_count)
        return True
