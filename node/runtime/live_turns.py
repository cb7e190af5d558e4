"""The turns that run on a node, and their common end."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from fabric.ids import TenantId
from node.runtime.health import Health
from node.runtime.one_loop import on_its_loop


class RunningTurn(Protocol):
    """Operations that apply to every running turn."""

    task: asyncio.Task[None]

    @property
    def tenant(self) -> TenantId:
        """Tenant that requested it."""
        ...

    @property
    def is_preparing(self) -> bool:
        """Whether its prompt's tokens are not known yet."""
        ...

    def cancel(self) -> None:
        """End the turn as if its client had disconnected."""
        ...


class LiveTurns:
    """Running turns of a node; used on its event loop."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._turns: dict[RunningTurn, None] = {}  # in order of start
        self.begun_count = 0
        self.fenced_count = 0  # ended because another node owns their agent

    def __iter__(self) -> Iterator[RunningTurn]:
        return iter(list(self._turns))

    def __len__(self) -> int:
        return len(self._turns)

    @on_its_loop
    def add(self, turn: RunningTurn) -> None:
        self._turns[turn] = None
        self.begun_count += 1

    @on_its_loop
    def discard(self, turn: RunningTurn) -> None:
        self._turns.pop(turn, None)

    async def quiesce(self, limit_s: float | None = None) -> int:
        """Wait until every running turn has been saved; return how many still run at the limit.

        Turns that begin in the meantime are not waited for.
        """
        tasks = {turn.task for turn in self._turns}
        if not tasks:
            return 0
        _, running = await asyncio.wait(tasks, timeout=limit_s)
        return len(running)

    async def end(self, wait_s: float = 0.0) -> None:
        """Refuse new turns, give running ones `wait_s` to end, and cancel the rest."""
        self._health.is_draining = self._health.is_stopping = True
        if wait_s > 0.0:
            await self.quiesce(wait_s)
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel the running turns; they end with an error event, their tokens saved."""
        for turn in self:
            turn.cancel()
        await self.quiesce()
