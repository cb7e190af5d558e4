"""How long this process stood still: that is no node's silence.

An event loop that is late, for want of CPU or because a lid was closed, reads the answers to its
heartbeats late, too. What each tick is late by is taken off every node's silence, and is added to
the time that the heartbeats under way have. So an overloaded router ends no lease.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fabric.limits import HEARTBEAT_S
from fabric.ports import Clock
from router.limits import SUSPECT_S

TICKS_PER_HEARTBEAT = 4
LATE_LOOP_S = 0.05  # any timer is late by less

_LOG = logging.getLogger("macfabric.router.stalls")


class StallWatch:
    """Ticks while it runs; `forgive` is given the seconds of each stall by the router's clock."""

    def __init__(self, clock: Clock, forgive: Callable[[float], None]) -> None:
        self._clock = clock
        self._tick_s = HEARTBEAT_S / TICKS_PER_HEARTBEAT
        self._forgive = forgive
        self._ticked: tuple[float, float] | None = None  # by the clock, and by the loop's time
        self._deadlines: set[asyncio.Timeout] = set()

    async def run(self, heartbeat_s: float) -> None:
        """Tick until cancelled, several times in a heartbeat."""
        self._tick_s = heartbeat_s / TICKS_PER_HEARTBEAT
        self._ticked = self._now()
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                self.look()
                self._ticked = self._now()
        finally:
            self._ticked = None

    def look(self) -> None:
        """Forgive what the next tick is late by; also before a lease is judged."""
        if self._ticked is None:
            return
        clock_s, loop_s = self._now()
        passed_s, passed_loop_s = clock_s - self._ticked[0], loop_s - self._ticked[1]
        late_loop_s = passed_loop_s - self._tick_s
        late_s = 0.0
        if passed_s >= SUSPECT_S:  # also asleep: then the loop's own time may have stood still
            late_s = passed_s
        elif late_loop_s >= max(self._tick_s, LATE_LOOP_S):
            late_s = passed_s * late_loop_s / passed_loop_s
        if not late_s:
            return
        if late_s >= SUSPECT_S:
            _LOG.warning("the router stood still for %.1f s", late_s)
        self._ticked = clock_s, loop_s
        self._forgive(late_s)
        self._extend(max(0.0, late_loop_s))

    @asynccontextmanager
    async def patience(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after so many seconds in which this process ran."""
        async with asyncio.timeout(seconds) as deadline:
            self._deadlines.add(deadline)
            try:
                yield
            finally:
                self._deadlines.discard(deadline)

    def _extend(self, seconds: float) -> None:
        for deadline in self._deadlines:
            when_s = deadline.when()
            if when_s is not None and not deadline.expired():
                deadline.reschedule(when_s + seconds)

    def _now(self) -> tuple[float, float]:
        return self._clock.monotonic_s(), asyncio.get_running_loop().time()
