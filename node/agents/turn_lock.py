"""The lock that one turn of an agent, or one change of its record, holds at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from fabric.errors import RetryLaterError


class TurnLock(asyncio.Lock):
    """A lock that is also taken while somebody waits for it, who comes next when it is let go.

    So whoever finds it free has it at once, and what was looked at before still holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting_count = 0

    async def acquire(self) -> Literal[True]:
        """Wait for it."""
        self._waiting_count += 1
        try:
            return await super().acquire()
        finally:
            self._waiting_count -= 1

    @asynccontextmanager
    async def held(
        self, within_s: float, busy: str = "a turn of this agent is still running"
    ) -> AsyncIterator[None]:
        """Have it for a while; raise RetryLaterError that says `busy` where it is not to be had."""
        try:
            async with asyncio.timeout(within_s):  # unlike `wait_for`: at once if free
                await self.acquire()
        except TimeoutError:
            raise RetryLaterError(busy, code="agent_busy") from None
        try:
            yield
        finally:
            self.release()

    def locked(self) -> bool:
        """Say whether somebody has it, or will before anybody else."""
        return self._waiting_count > 0 or super().locked()
