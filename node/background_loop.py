"""Background loops that survive a failed round, and back-off between retries."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from node.limits import LOOP_RETRY_S

_log = logging.getLogger(__name__)


class BackgroundLoop:
    """Loop that runs `step` repeatedly; each step returns the seconds to wait before the next.

    A step that raises is logged, counted, and repeated after a pause.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[float]],
        failed: Callable[[], None],
        *,
        first_wait_s: float = 0.0,
        hurry: asyncio.Event | None = None,
    ) -> None:
        """Create a loop; `name` is for the log, and `failed` is called when a step raises.

        Setting `hurry` starts the next step now.
        """
        self._name = name
        self._step = step
        self._failed = failed
        self._wait_s = first_wait_s
        self._hurry = hurry or asyncio.Event()
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop after the current step."""
        self._is_over = True
        self._hurry.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._wait_s)
            self._hurry.clear()
            if self._is_over:
                return
            try:
                self._wait_s = await self._step()
            except Exception:  # noqa: BLE001 - a failed round must not end the loop
                _log.exception("%s failed and will be retried", self._name)
                self._failed()
                self._wait_s = LOOP_RETRY_S


@dataclass(slots=True)
class BackOff:
    """Growing pauses between the retries of one operation."""

    first_s: float
    longest_s: float
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def next_s(self) -> float:
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self.longest_s)
        return wait_s
