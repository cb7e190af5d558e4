"""The lock that one turn of an agent, or one change of its record, holds at a time."""

import asyncio
from typing import Literal


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

    def locked(self) -> bool:
        """Say whether somebody has it, or will before anybody else."""
        return self._waiting_count > 0 or super().locked()
