"""The memory of idle caches: what it holds now, and who gives way where it is wanted."""

from typing import Protocol

from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.runtime.one_loop import on_its_loop
from node.tiers.unsaved import Unsaved


class IdleMemory(Protocol):
    """Caches beside those of the table's agents, which all go together."""

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        ...

    def clear(self) -> None:
        """Give all of it back."""
        ...


class HotTier:
    """Caches that a node holds in memory; used on its event loop."""

    def __init__(self, table: AgentTable, engine: EngineThread, unsaved: Unsaved) -> None:
        self._table = table
        self._engine = engine
        self._unsaved = unsaved
        self._beside: list[IdleMemory] = []

    @property
    def limit_bytes(self) -> int:
        """Memory that caches may hold; less than planned while the machine's is short."""
        return self._engine.budget.limit_bytes

    def count(self, beside: IdleMemory) -> None:
        """Count these caches, too, from now on."""
        self._beside.append(beside)

    @on_its_loop
    def note(self) -> None:
        """Tell the memory budget what idle caches hold now; call it after every change."""
        held_bytes = self._table.hot_bytes + sum(each.size_bytes for each in self._beside)
        self._engine.budget.set_idle(held_bytes)
        if held_bytes > self.limit_bytes:
            self._unsaved.hurry()

    @property
    def room_bytes(self) -> int:
        """Memory that idle caches may hold beside those at work."""
        return self._engine.budget.claimable_bytes

    @on_its_loop
    def drop_resident(self, budget_bytes: int | None = None) -> None:
        """Free idle agents' caches, worth least first, until they fit the limit, or less."""
        before_bytes = self._engine.budget.idle_bytes
        self._table.drop_resident(self.limit_bytes if budget_bytes is None else budget_bytes)
        self._tell(before_bytes)

    @on_its_loop
    def make_room(self, size_bytes: int) -> None:
        """Cool idle agents until `size_bytes` more are free, as far as that goes."""
        before_bytes = self._engine.budget.idle_bytes
        wanted_bytes = self._table.hot_bytes - size_bytes
        self._table.drop_resident(wanted_bytes)
        if self._table.hot_bytes > wanted_bytes:
            for each in self._beside:
                each.clear()
        self._unsaved.hurry()
        self._tell(before_bytes)

    def _tell(self, before_bytes: int) -> None:
        self.note()
        # Where nothing was freed, whoever asked would only ask again: its next poll is soon.
        if self._engine.budget.idle_bytes < before_bytes:
            self._engine.wake()
