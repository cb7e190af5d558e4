"""Orderly stop of a router: refuse new turns, wait for running ones, cancel the rest.

A restart refuses nothing. New connections wait in the queue of the listening sockets, which the
process keeps, for the router that it becomes.
"""

import asyncio
import json
import math
from collections.abc import Callable

import uvicorn

from router.restart import RestartRequest
from router.turns.open_turn import RunningTurns

POLL_S = 0.05
REPORT_S = 2.0
CANCELLED_S = 2.0  # for cancelled turns to send their clients an error
CUT_S = 5.0  # after the wait for turns, until a restart cuts the connections that are left
STANDBY_S = 5.0  # for a standby to become active, once this router has given its term up


def report_drain(turns: int, left_s: float) -> None:
    """Print the progress of the stop as one line."""
    line = {"event": "draining", "turns": turns, "left_s": round(left_s, 1)}
    print(json.dumps(line), flush=True)  # noqa: T201 - read by the supervisor


class RouterStop:
    """Stop or restart; a stop starts with the first signal and is cut short by the second."""

    def __init__(
        self,
        server: uvicorn.Server,
        turns: RunningTurns,
        wait_s: Callable[[], float],
        on_begin: Callable[[], None] = lambda: None,
        report: Callable[[int, float], None] = report_drain,
        *,
        restart: RestartRequest | None = None,
        has_standby: Callable[[], bool] = lambda: False,
        is_replaced: Callable[[], bool] = lambda: False,
    ) -> None:
        """Stop `server`, after `on_begin`, by which a standby may take over.

        `has_standby` returns whether one is there, `is_replaced` whether it has taken over.
        """
        self._server = server
        self._turns = turns
        self._wait_s = wait_s
        self._on_begin = on_begin
        self._report = report
        self._stopping: asyncio.Task[None] | None = None
        self._is_hurried = False
        self._restart = restart
        self._has_standby = has_standby
        self._is_replaced = is_replaced
        if restart is not None:
            restart.bind(self.begin_restart)

    def on_signal(self) -> None:
        """Start to stop, or end at once if a stop or a restart has started."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
            return
        self._is_hurried = True
        if self._restart is not None:
            self._restart.is_requested = False

    def begin_restart(self, wait_s: float) -> None:
        """Start to restart, unless a stop has started."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._end_for_restart(wait_s))

    async def close(self) -> None:
        """Cancel the wait for turns."""
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)

    async def _stop(self) -> None:
        try:
            self._turns.refuse()
            self._on_begin()
            await self._drain(self._wait_s())
            self._turns.break_off()
            await self._wait_for_ends(CANCELLED_S)
        finally:
            self._server.should_exit = True

    async def _end_for_restart(self, wait_s: float) -> None:
        """End the server without a refusal: requests on open connections are still served."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        try:
            if self._has_standby():
                self._on_begin()
                await self._hand_over()
                await self._drain(wait_s)  # requests are sent on to the other router meanwhile
            left_s = max(0.0, deadline_s - loop.time())
            self._server.config.timeout_graceful_shutdown = math.ceil(left_s + CUT_S)
            self._server.should_exit = True
            # `close` ends this wait once all connections have ended.
            while loop.time() < deadline_s and not self._is_hurried:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            self._turns.break_off()
        finally:
            self._server.should_exit = True

    async def _hand_over(self) -> None:
        """Wait until another router is the active one."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + STANDBY_S
        # The terms of other routers arrive with heartbeats, which set no event.
        while (  # noqa: ASYNC110
            not self._is_replaced() and loop.time() < deadline_s and not self._is_hurried
        ):
            await asyncio.sleep(POLL_S)

    async def _drain(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        while self._turns and not self._is_hurried and (left_s := deadline_s - loop.time()) > 0:
            self._report(len(self._turns), left_s)
            await self._wait_for_ends(min(REPORT_S, left_s))

    async def _wait_for_ends(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline_s, was_hurried = loop.time() + limit_s, self._is_hurried
        # Turns end in many places that do not notify this wait.
        while (  # noqa: ASYNC110
            self._turns and loop.time() < deadline_s and self._is_hurried == was_hurried
        ):
            await asyncio.sleep(POLL_S)
