"""Flusher: save again the agents that the disk refused, which are in memory only.

Every turn is saved at its end. If that fails, the agent is the last to be dropped from memory, and
the save is repeated: while it is idle, when its memory is wanted, as soon as another agent's save
succeeds, when the router asks for a flush, and at shutdown. At most all agents of the table wait,
and while the disk keeps failing, the flusher pauses between attempts.
"""

import asyncio
import logging

from fabric.errors import FabricError
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.limits import FLUSH_FAILURES_MAX
from node.store.posix_disk import DiskError
from node.tiers.disk_budget import NoRoomError
from node.tiers.hot_tier import HotTier, Unsaved
from node.tiers.record_writer import RecordWriters

_log = logging.getLogger(__name__)


class Flusher:
    """Saves one node's unsaved agents; lives on its event loop."""

    def __init__(
        self, table: AgentTable, unsaved: Unsaved, writers: RecordWriters, hot: HotTier
    ) -> None:
        self._table = table
        self._unsaved = unsaved
        self._writers = writers
        self._hot = hot
        self._pass_lock = asyncio.Lock()

    async def flush(self) -> int:
        """Try to save every idle agent; return how many are still in memory only."""
        async with self._pass_lock:
            saved_count = await self._pass()
        unsaved_count, limit_bytes = len(self._unsaved.agents()), self._hot.limit_bytes
        if saved_count:
            _log.info("saved %d agents that were in memory only", saved_count)
            self._unsaved.note_success()
        if unsaved_count and self._table.hot_bytes > limit_bytes:
            self._table.drop_unsaved(limit_bytes)
            self._hot.note()
        return unsaved_count

    async def _pass(self) -> int:
        failures = saved_count = 0
        for agent in self._unsaved.agents():
            if agent.is_busy:
                continue  # its turn will save it
            failure = await self._save(agent)
            if failure is None:
                saved_count += 1
                # At once: the other saves may take long, and newer turns need the memory.
                self._hot.drop_resident(self._hot.room_bytes)
            # A disk error affects all agents; an error of one agent or its tenant does not.
            failures += isinstance(failure, DiskError) and not isinstance(failure, NoRoomError)
            if failures == FLUSH_FAILURES_MAX:
                break
        return saved_count

    async def _save(self, agent: Agent) -> Exception | None:
        """Try to save an agent; return why that failed."""
        async with agent.turn_lock:
            cache, record = agent.cache, agent.manifest
            is_here = self._table.get(agent.key) is agent
            if not is_here or not agent.is_unsaved or cache is None:
                return None
            writer = self._writers.of_idle(agent, cache)
            try:
                record = await writer.publish(record, record.tokens_count)
            except (FabricError, OSError) as error:
                self._unsaved.note_failure(agent, error, is_repeated=True)
                return error
            agent.note_saved(record, writer.spans)
            self._table.put(agent)
            return None
