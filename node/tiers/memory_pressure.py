"""Memory pressure: shrink the budget of agents' caches before the machine swaps.

    warning    the budget shrinks by a part, to less than is held: idle caches go to disk; again
               after MEMORY_SHRINK_S, since a system notices freed memory late
    critical   it shrinks by two parts with each poll
    normal     it grows by a part with each poll, once MEMORY_CALM_S have passed

One part in MEMORY_FLOOR_PARTS always stays, and a turn that runs alone may take more. Arrays
beyond this node's share of the machine count as a warning.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fabric.ports import Clock
from node.background_loop import BackgroundLoop
from node.engine.engine_thread import EngineThread
from node.limits import (
    MEMORY_CALM_S,
    MEMORY_FLOOR_PARTS,
    MEMORY_POLL_S,
    MEMORY_SHRINK_PARTS,
    MEMORY_SHRINK_S,
)
from node.machine import Pressure
from node.tiers.hot_tier import HotTier

_PARTS: Final = {Pressure.WARNING: 1, Pressure.CRITICAL: 2}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryGauge:
    """Memory pressure of the machine, and the excess of the node's arrays over its share."""

    pressure: Callable[[], Pressure] = lambda: Pressure.NORMAL
    excess_bytes: Callable[[], int] = lambda: 0


class MemoryPressure:
    """Adapts one node's budget to the machine; runs on the node's event loop."""

    def __init__(
        self,
        gauge: MemoryGauge,
        engine: EngineThread,
        hot: HotTier,
        clock: Clock,
        note_failed_round: Callable[[], None],
    ) -> None:
        self._gauge = gauge
        self._engine = engine
        self._hot = hot
        self._clock = clock
        self._pressed_s = -math.inf  # time of the last pressure
        self._shrunk_s = -math.inf  # time of the last shrink
        self.level = Pressure.NORMAL
        self.loop = BackgroundLoop("watching the machine's memory", self.step, note_failed_round)

    async def step(self) -> float:
        """Poll once and adapt the budget; return the seconds until the next poll."""
        level, now_s = self._look(), self._clock.monotonic_s()
        if level is not self.level:
            _log.info("memory pressure is %s, was %s", level.word, self.level.word)
        self.level = level
        if level is not Pressure.NORMAL:
            self._pressed_s = now_s
            if level is Pressure.CRITICAL or now_s - self._shrunk_s >= MEMORY_SHRINK_S:
                self._shrunk_s = now_s
                await self._shrink(_PARTS[level])
        elif now_s - self._pressed_s >= MEMORY_CALM_S:
            budget = self._engine.budget
            budget.restrict(budget.limit_bytes + budget.total_bytes // MEMORY_SHRINK_PARTS)
        return MEMORY_POLL_S

    def _look(self) -> Pressure:
        level = self._gauge.pressure()
        exceeds = level is Pressure.NORMAL and self._gauge.excess_bytes() > 0
        return Pressure.WARNING if exceeds else level

    async def _shrink(self, parts: int) -> None:
        budget = self._engine.budget
        held_bytes = min(budget.limit_bytes, budget.reserved_bytes + budget.idle_bytes)
        wanted_bytes = held_bytes - parts * budget.total_bytes // MEMORY_SHRINK_PARTS
        budget.restrict(max(wanted_bytes, budget.total_bytes // MEMORY_FLOOR_PARTS))
        self._hot.drop_resident()
        await self._engine.return_unused()
