"""Memory of idle caches: their sizes, which of them are unsaved, and which to drop."""

import asyncio
import logging
from typing import Protocol

from fabric.ids import AgentKey
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.limits import AGENTS_PER_NODE_MAX
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
        self.save_requested = asyncio.Event()  # set to save the agents now
        self.failed_count = 0  # saves that the disk refused
        self._reported: dict[AgentKey, str] = {}  # why each agent could not be saved

    def agents(self) -> list[Agent]:
        """List the agents that are in memory only, least recently used first."""
        waiting = [agent for agent in self._table if agent.is_unsaved]
        return sorted(waiting, key=lambda agent: agent.manifest.used_s)

    @on_its_loop
    def hurry(self) -> None:
        """Save the waiting agents now, because their memory is needed."""
        if self.agents():
            self.save_requested.set()

    @on_its_loop
    def note_failure(self, agent: Agent, error: Exception, *, is_repeated: bool = False) -> None:
        """Note that an agent is in memory only, and report it in the node's health.

        A repeated failure with the same reason, perhaps every second, is not reported again.
        """
        agent.is_durable = False
        self.failed_count += 1
        # Health is public, and a file's name reveals which blocks an agent has.
        reason = error.reason if isinstance(error, DiskError) else type(error).__name__
        self._health.troubles[SAVING] = f"cannot save agents: {reason}"
        is_known = is_repeated and self._reported.get(agent.key) == str(error)
        _log.log(
            logging.DEBUG if is_known else logging.ERROR, "a turn is in memory only: %s", error
        )
        if len(self._reported) >= AGENTS_PER_NODE_MAX:
            self._reported.clear()
        self._reported[agent.key] = str(error)
        if isinstance(error, DiskError) and error.is_gone:
            self.save_requested.set()  # the folder may be recreated at once

    @on_its_loop
    def note_success(self) -> None:
        """Note that the disk accepts agents; retry the waiting ones at once."""
        if self.agents():
            self.save_requested.set()
        else:
            self._health.troubles.pop(SAVING, None)
            self._reported.clear()


class IdleMemory(Protocol):
    """Caches outside the agent table that are freed all at once."""

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        ...

    def clear(self) -> None:
        """Free all caches."""
        ...


class HotTier:
    """Resident caches of a node; used on its event loop."""

    def __init__(self, table: AgentTable, engine: EngineThread, unsaved: Unsaved) -> None:
        self._table = table
        self._engine = engine
        self._unsaved = unsaved
        self._others: list[IdleMemory] = []

    @property
    def limit_bytes(self) -> int:
        """Memory that caches may hold; reduced under memory pressure."""
        return self._engine.budget.limit_bytes

    def count(self, other: IdleMemory) -> None:
        """Count other idle caches from now on."""
        self._others.append(other)

    @on_its_loop
    def note(self) -> None:
        """Report the size of idle caches to the memory budget; call it after every change."""
        held_bytes = self._table.hot_bytes + sum(other.size_bytes for other in self._others)
        self._engine.budget.set_idle(held_bytes)
        if held_bytes > self.limit_bytes:
            self._unsaved.hurry()

    @property
    def room_bytes(self) -> int:
        """Memory that idle caches may hold in addition to those of running turns."""
        return self._engine.budget.claimable_bytes

    @on_its_loop
    def drop_resident(self, budget_bytes: int | None = None) -> None:
        """Free idle agents' caches, least valuable first, down to the limit or `budget_bytes`."""
        before_bytes = self._engine.budget.idle_bytes
        self._table.drop_resident(self.limit_bytes if budget_bytes is None else budget_bytes)
        self._report(before_bytes)

    @on_its_loop
    def make_room(self, size_bytes: int) -> None:
        """Free idle agents' caches until `size_bytes` more are free, as far as possible."""
        before_bytes = self._engine.budget.idle_bytes
        wanted_bytes = self._table.hot_bytes - size_bytes
        self._table.drop_resident(wanted_bytes)
        if self._table.hot_bytes > wanted_bytes:
            for other in self._others:
                other.clear()
        self._unsaved.hurry()
        self._report(before_bytes)

    def _report(self, before_bytes: int) -> None:
        self.note()
        # If nothing was freed, waking the engine would only repeat its request.
        if self._engine.budget.idle_bytes < before_bytes:
            self._engine.wake()
