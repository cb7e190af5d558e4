"""Do again what the disk refused: agents that are in memory only, erasures left half done.

Every turn is saved at its end. If the disk refuses, the agent stays hot before all others, as
far as memory goes, and is tried again: while it is idle, when its memory is wanted, as soon as
another agent's save succeeds, when the router asks for a flush, and at shutdown. What waits is
never more than the agents of the table, and a disk that goes on refusing is left alone for a
while. Erased agents that the disk would not let go are removed in the same rhythm; a restart
removes them, too.
"""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from fabric.errors import FabricError
from fabric.limits import FLUSH_FAILURES_MAX, FLUSH_IDLE_S, FLUSH_RETRY_S
from node.agent import Agent
from node.agent_store import stock_of
from node.eviction import finish_erasures
from node.posix_disk import DiskError
from node.record_writer import RecordWriter

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)


class Flusher:
    """One node's unsaved agents; lives on its event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._is_over = False
        self._one_pass = asyncio.Lock()

    def start(self) -> None:
        """Begin to look after agents that are idle."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End, once a save under way is finished or has failed."""
        self._is_over = True
        self._hurry.set()
        if self._task is not None:
            await self._task

    # --- what others tell --------------------------------------------------------------------

    def note_failure(self, agent: Agent, error: Exception) -> None:
        """Note that an agent is in memory only, and say so to who asks for the node's health."""
        agent.is_durable = False
        # Health is for everybody, and a file's name says which blocks an agent has.
        reason = error.reason if isinstance(error, DiskError) else type(error).__name__
        self._node.degraded = f"cannot save agents: {reason}"
        _log.error("a turn is in memory only: %s", error)

    def note_success(self) -> None:
        """Note that the disk takes agents; those that wait are tried at once."""
        if self.unsaved():
            self._hurry.set()
        else:
            self._node.degraded = None

    def hurry(self) -> None:
        """Save what waits now, because its memory is wanted."""
        if self.unsaved():
            self._hurry.set()

    # --- what is done ------------------------------------------------------------------------

    def unsaved(self) -> list[Agent]:
        """List the agents that are in memory only, least recently used first."""
        waiting = [agent for agent in self._node.table if agent.is_unsaved]
        return sorted(waiting, key=lambda agent: agent.manifest.used_s)

    async def flush(self) -> int:
        """Try to save every idle agent; return how many are still in memory only."""
        async with self._one_pass:
            saved = await self._pass()
        left = len(self.unsaved())
        if saved:
            _log.info("saved %d agents that were in memory only", saved)
            if not left:
                self._node.degraded = None
            self._node.table.cool(self._node.settings.hot_bytes)
            self._node.make_room(0)  # whoever waits for memory looks again
        if left and self._node.table.hot_bytes > self._node.settings.hot_bytes:
            self._node.table.shed(self._node.settings.hot_bytes)
            self._node.note_hot()
        return left

    async def _pass(self) -> int:
        failures = saved = 0
        for agent in self.unsaved():
            if agent.is_busy:
                continue  # its turn saves it
            if await self._save(agent):
                saved += 1
            else:
                failures += 1
                if failures == FLUSH_FAILURES_MAX:
                    break
        return saved

    async def _save(self, agent: Agent) -> bool:
        node = self._node
        async with agent.turn_lock:
            cache, record = agent.cache, agent.manifest
            if node.table.get(agent.key) is not agent or not agent.is_unsaved or cache is None:
                return True
            stock = stock_of(agent.saved, agent.stored_tokens)
            writer = RecordWriter(node, agent, cache, stock, agent.stored_tokens)
            try:
                record = await writer.publish(record, record.tokens_count)
            except (FabricError, OSError) as error:
                self.note_failure(agent, error)
                return False
            agent.note_saved(record, writer.spans)
            node.table.put(agent)
            return True

    async def _run(self) -> None:
        while not self._is_over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), FLUSH_IDLE_S)
            self._hurry.clear()
            if not self._is_over and self._node.owes_erasures:
                await finish_erasures(self._node)
            if not self._is_over and self.unsaved() and await self.flush():
                await asyncio.sleep(FLUSH_RETRY_S)
