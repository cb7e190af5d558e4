"""Simulated time: a heap of events, and the clock that they set."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

Action: TypeAlias = Callable[..., None]


class Timeline:
    """Events in order of time, then of arrival; also the router's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events_count = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._order = 0
        self._is_stopped = False

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Action, *arguments: Any) -> None:
        """Call `action` at `time_s`, or now if that is past."""
        self._order += 1
        heappush(self._heap, (max(time_s, self.now_s), self._order, action, arguments))

    def after(self, delay_s: float, action: Action, *arguments: Any) -> None:
        """Call `action` in `delay_s`."""
        self.at(self.now_s + delay_s, action, *arguments)

    def stop(self) -> None:
        """End `run` after the event in progress."""
        self._is_stopped = True

    def run(self, events_max: int | None = None) -> bool:
        """Run events until `stop`, `events_max` of them at most; return False if more are left."""
        heap, count = self._heap, self.events_count
        until = math.inf if events_max is None else count + events_max
        while heap and not self._is_stopped and count < until:
            self.now_s, _, action, arguments = heappop(heap)
            count += 1
            action(*arguments)
        self.events_count = count
        return self._is_stopped or not heap
