"""Detection of stalls of this process, which must not count as a node's silence.

An event loop that is late, for lack of CPU or after a closed lid, reads the answers to its
heartbeats late, too. The lateness of every tick is subtracted from every node's silence and added
to the timeouts of heartbeats in progress. So an overloaded router ends no lease.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fabric.limits import HEARTBEAT_S
from fabric.ports import Clock
from router.limits import SUSPECT_S

TICKS_PER_HEARTBEAT = 4
LATE_LOOP_S = 0.05  # timers are normally late by less

_LOG = logging.getLogger("macfabric.router.stalls")


class StallWatch:
    """Periodic ticks; `forgive` is called with the seconds of every stall."""

    def __init__(self, clock: Clock, forgive: Callable[[float], None]) -> None:
        self._clock = clock
        self._tick_s = HEARTBEAT_S / TICKS_PER_HEARTBEAT
        self._forgive = forgive
        self._ticked: tuple[float, float] | None = None  # by the clock, and by the loop's time
        self._deadlines: set[asyncio.Timeout] = set()

    async def run(self, heartbeat_s: float) -> None:
        """Tick until cancelled, several times per heartbeat."""
        self._tick_s = heartbeat_s / TICKS_PER_HEARTBEAT
        self._ticked = self._now()
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                self.check_lateness()
                self._ticked = self._now()
        finally:
            self._ticked = None

    def check_lateness(self) -> None:
        """Forgive the lateness of the next tick; also called before a lease is checked."""
        if self._ticked is None:
            return
        clock_s, loop_s = self._now()
        passed_s, passed_loop_s = clock_s - self._ticked[0], loop_s - self._ticked[1]
        late_loop_s = passed_loop_s - self._tick_s
        late_s = 0.0
        if passed_s >= SUSPECT_S:  # perhaps asleep, when the loop's own time may have stopped
            late_s = passed_s
        elif late_loop_s >= max(self._tick_s, LATE_LOOP_S):
            late_s = passed_s * late_loop_s / passed_loop_s
        if not late_s:
            return
        if late_s >= SUSPECT_S:
            _LOG.warning("the router stalled for %.1f s", late_s)
        self._ticked = clock_s, loop_s
        self._forgive(late_s)
        self._extend(max(0.0, late_loop_s))

    @asynccontextmanager
    async def patience(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after `seconds` in which this process was running."""
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
