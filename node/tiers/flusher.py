"""Do again what the disk refused: agents that are in memory only, erasures left half done.

Every turn is saved at its end. If the disk refuses, the agent stays hot before all others, as
far as memory goes, and is tried again: while it is idle, when its memory is wanted, as soon as
another agent's save succeeds, when the router asks for a flush, and at shutdown. What waits is
never more than the agents of the table, and a disk that goes on refusing is left alone for a
while. Erased agents that the disk would not let go are removed in the same rhythm; a restart
removes them, too.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from fabric.errors import FabricError
from fabric.limits import (
    FLUSH_FAILURES_MAX,
    FLUSH_IDLE_S,
    FLUSH_RETRY_S,
    SELF_TEST_RETRY_MAX_S,
)
from node.agents.agent import Agent
from node.background_loop import BackgroundLoop
from node.self_test import SAVING, run_self_test
from node.store.posix_disk import DiskError
from node.store.stock import stock_of
from node.tiers.disk_budget import NoRoomError
from node.tiers.record_writer import RecordWriter

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)


class Flusher:
    """One node's unsaved agents; lives on its event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._loop = BackgroundLoop(
            "saving again what the disk refused",
            self._step,
            node.note_failed_round,
            first_wait_s=FLUSH_IDLE_S,
        )
        self._one_pass = asyncio.Lock()
        self._retest_at_s = 0.0
        self._retest_wait_s = FLUSH_IDLE_S

    def start(self) -> None:
        """Begin to look after agents that are idle."""
        self._loop.start()

    async def stop(self) -> None:
        """End, once a save under way is finished or has failed."""
        await self._loop.stop()

    # --- what others tell --------------------------------------------------------------------

    def note_failure(self, agent: Agent, error: Exception) -> None:
        """Note that an agent is in memory only, and say so to who asks for the node's health."""
        agent.is_durable = False
        # Health is for everybody, and a file's name says which blocks an agent has.
        reason = error.reason if isinstance(error, DiskError) else type(error).__name__
        self._node.troubles[SAVING] = f"cannot save agents: {reason}"
        _log.error("a turn is in memory only: %s", error)

    def note_success(self) -> None:
        """Note that the disk takes agents; those that wait are tried at once."""
        if self.unsaved():
            self._loop.hurry()
        else:
            self._node.troubles.pop(SAVING, None)

    def hurry(self) -> None:
        """Save what waits now, because its memory is wanted."""
        if self.unsaved():
            self._loop.hurry()

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
                self._node.troubles.pop(SAVING, None)
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
            failure = await self._save(agent)
            saved += failure is None
            # The disk's fault is everybody's; another agent's, or its tenant's, is not.
            failures += isinstance(failure, DiskError) and not isinstance(failure, NoRoomError)
            if failures == FLUSH_FAILURES_MAX:
                break
        return saved

    async def _save(self, agent: Agent) -> Exception | None:
        """Try to save an agent; return why that failed."""
        node = self._node
        async with agent.turn_lock:
            cache, record = agent.cache, agent.manifest
            if node.table.get(agent.key) is not agent or not agent.is_unsaved or cache is None:
                return None
            stock = stock_of(agent.saved, agent.stored_tokens)
            writer = RecordWriter(node, agent, cache, stock, agent.stored_tokens)
            try:
                record = await writer.publish(record, record.tokens_count)
            except (FabricError, OSError) as error:
                self.note_failure(agent, error)
                return error
            agent.note_saved(record, writer.spans)
            node.table.put(agent)
            return None

    async def _step(self) -> float:
        if self._node.erasing.is_owed:
            await self._node.erasing.finish()
        if self.unsaved() and await self.flush():
            await asyncio.sleep(FLUSH_RETRY_S)  # whoever is in a hurry
        await self._retest()
        return FLUSH_IDLE_S

    async def _retest(self) -> None:
        """Repeat a self-test that could not tell, ever less often, while no turn runs."""
        node = self._node
        if node.is_tested or node.turns or node.state != "ready":
            return
        if node.clock.monotonic_s() >= self._retest_at_s:
            await run_self_test(node)
            self._retest_wait_s = min(2 * self._retest_wait_s, SELF_TEST_RETRY_MAX_S)
            self._retest_at_s = node.clock.monotonic_s() + self._retest_wait_s
