"""Orderly stop of a router: refuse new turns, wait for running ones, cancel the rest."""

import asyncio
import json
from collections.abc import Callable

import uvicorn

from router.turns.running_turns import RunningTurns

POLL_S = 0.05
REPORT_S = 2.0
CANCELLED_S = 2.0  # for cancelled turns to send their clients an error


def report_drain(turns: int, left_s: float) -> None:
    """Print the progress of the stop as one line."""
    line = {"event": "draining", "turns": turns, "left_s": round(left_s, 1)}
    print(json.dumps(line), flush=True)  # noqa: T201 - read by the supervisor


class RouterStop:
    """Stop that starts with the first signal and is cut short by the second."""

    def __init__(
        self,
        server: uvicorn.Server,
        turns: RunningTurns,
        wait_s: Callable[[], float],
        on_begin: Callable[[], None] = lambda: None,
        report: Callable[[int, float], None] = report_drain,
    ) -> None:
        self._server = server
        self._turns = turns
        self._wait_s = wait_s
        self._on_begin = on_begin
        self._report = report
        self._stopping: asyncio.Task[None] | None = None
        self._is_hurried = False

    def on_signal(self) -> None:
        """Start to stop, or end at once if that has started."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        else:
            self._is_hurried = True

    async def close(self) -> None:
        """Cancel the wait for turns."""
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)

    async def _stop(self) -> None:
        try:
            self._turns.refuse()
            self._on_begin()
            await self._drain()
            self._turns.break_off()
            await self._all_ended(CANCELLED_S)
        finally:
            self._server.should_exit = True

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wait_s()
        while self._turns and not self._is_hurried and (left_s := deadline_s - loop.time()) > 0:
            self._report(len(self._turns), left_s)
            await self._all_ended(min(REPORT_S, left_s))

    async def _all_ended(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s, was_hurried = loop.time() + limit_s, self._is_hurried
        # Turns end in many places that do not notify this wait.
        while (  # noqa: ASYNC110
            self._turns and loop.time() < deadline_s and self._is_hurried == was_hurried
        ):
            await asyncio.sleep(POLL_S)
