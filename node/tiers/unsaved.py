"""Agents that are in memory only, since the disk refused them, and their health report."""

import asyncio
import logging

from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.runtime.health import Health
from node.runtime.one_loop import on_its_loop
from node.store.posix_disk import DiskError

SAVING = "saving"  # the cause of trouble

_log = logging.getLogger(__name__)


class Unsaved:
    """Agents of a node that are not saved yet; used on its event loop."""

    def __init__(self, table: AgentTable, health: Health) -> None:
        self._table = table
        self._health = health
        self.is_wanted = asyncio.Event()  # that they are saved now

    def agents(self) -> list[Agent]:
        """List the agents that are in memory only, least recently used first."""
        waiting = [agent for agent in self._table if agent.is_unsaved]
        return sorted(waiting, key=lambda agent: agent.manifest.used_s)

    @on_its_loop
    def hurry(self) -> None:
        """Save what waits now, because its memory is wanted."""
        if self.agents():
            self.is_wanted.set()

    @on_its_loop
    def note_failure(self, agent: Agent, error: Exception) -> None:
        """Note that an agent is in memory only, and report it in the node's health."""
        agent.is_durable = False
        # Health is public, and a file's name reveals which blocks an agent has.
        reason = error.reason if isinstance(error, DiskError) else type(error).__name__
        self._health.troubles[SAVING] = f"cannot save agents: {reason}"
        _log.error("a turn is in memory only: %s", error)

    @on_its_loop
    def note_success(self) -> None:
        """Note that the disk takes agents; those that wait are tried at once."""
        if self.agents():
            self.is_wanted.set()
        else:
            self._health.troubles.pop(SAVING, None)
