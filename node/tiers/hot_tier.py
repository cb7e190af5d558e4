"""Memory of idle caches: what it holds, and which caches are dropped to make room."""

from typing import Protocol

from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.runtime.one_loop import on_its_loop
from node.tiers.unsaved import Unsaved


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
        """Free idle agents' caches until `size_bytes` more are free, if there are that many."""
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
        # If nothing was freed, waking the engine would only make it ask again.
        if self._engine.budget.idle_bytes < before_bytes:
            self._engine.wake()
