"""Agents of a node with their records in memory and on disk; repair of records that lost blocks.

A lost block is saved again from memory, or the record is cut before it. The agent's next turn would
do so too; a move, a copy or a pin cannot wait for it, so it repairs the record first: one lost
block must not keep the agent on this node.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from fabric.kvcache.block_chain import BlockRef
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.stored_part import truncate_record
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.limits import RECORD_WRITES_MAX
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore, BlocksLostError
from node.tiers.hot_tier import HotTier
from node.tiers.record_writer import RecordWriters

MEND_WAIT_S = 8.0  # wait for a turn that holds the agent

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


async def despite_losses(write: Callable[[], Awaitable[_T]]) -> _T:
    """Run `write`, and repeat it if the drive loses one of the record's blocks meanwhile."""
    for _ in range(RECORD_WRITES_MAX - 1):
        with contextlib.suppress(BlocksLostError):
            return await write()
    return await write()


@dataclass(frozen=True, slots=True)
class AgentRecords:
    """Records of a node's agents; used on its event loop, which the disk never blocks."""

    table: AgentTable
    store: AgentStore
    workers: Workers
    hot: HotTier

    def is_here(self, agent: Agent) -> bool:
        """Return whether the agent is still in the table, and not replaced by another one."""
        return self.table.get(agent.key) is agent

    async def missing(self, record: Manifest) -> list[BlockRef]:
        """List the record's blocks that are not stored."""
        return await self.workers.run(lambda: self.store.missing(record))

    async def verify(self, record: Manifest) -> None:
        """Read and check the record's blocks; damaged ones count as missing from then on."""
        await self.workers.run(lambda: self.store.blocks.verify(dict.fromkeys(record.refs)))

    async def publish(self, record: Manifest, previous: Manifest | None) -> None:
        """Store a record in place of `previous`; raise DiskError."""
        await self.workers.run(lambda: self.store.publish(record, previous))

    async def republish(self, agent: Agent, record: Manifest) -> None:
        """Replace an agent's record under its turn lock, cut before the first lost block."""
        assert agent.turn_lock.locked(), "two writers would release its blocks twice"
        await despite_losses(lambda: self._republish(agent, record))

    async def _republish(self, agent: Agent, record: Manifest) -> None:
        previous = agent.saved
        lost = await self.missing(record)
        if lost:
            record = truncate_record(record, set(lost))
            agent.cache = None  # it holds more tokens than the truncated record
        await self.publish(record, previous)
        agent.take_record(record)
        self.table.put(agent)

    def put(self, agent: Agent) -> None:
        """Note that an agent's record and its cache changed."""
        self.table.put(agent)
        self.hot.note()


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
