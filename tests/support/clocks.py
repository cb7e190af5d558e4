"""Clocks of tests: scaled real time, or time set by the test."""

import time
from dataclasses import dataclass

EPOCH_S = 1_700_000_000.0  # added to monotonic time for the time of day


@dataclass
class ScaledClock:
    """Accelerated real time: leases of seconds expire within milliseconds."""

    scale: float = 1.0

    def monotonic_s(self) -> float:
        return time.monotonic() * self.scale

    def wall_s(self) -> float:
        return EPOCH_S + time.monotonic()


class ManualClock:
    """Clock that moves only when it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return EPOCH_S + self.now_s
