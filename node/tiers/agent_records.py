"""Agents of a node with their records in memory and on disk."""

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fabric.kvcache.block_chain import BlockRef
from fabric.record.manifest import Manifest
from fabric.record.stored_part import truncate_record
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.limits import RECORD_WRITES_MAX
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore, BlocksLostError
from node.tiers.hot_tier import HotTier

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
