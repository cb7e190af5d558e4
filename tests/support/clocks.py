"""Clocks of routers under test: real time at another pace, or moved by hand."""

import time
from dataclasses import dataclass

EPOCH_S = 1_700_000_000.0  # added to monotonic time for the time of day


@dataclass
class ScaledClock:
    """Real time, faster: leases of seconds run out in tests' milliseconds."""

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
