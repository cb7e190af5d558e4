"""The machine's clocks, the implementation of `fabric.ports.Clock`."""

import sys
import time

# Both count the time that the machine sleeps, and cannot be set.
_ELAPSED = time.CLOCK_MONOTONIC if sys.platform == "darwin" else time.CLOCK_BOOTTIME


def elapsed_s() -> float:
    """Return seconds that include sleep, which `SystemClock.monotonic_s` leaves out."""
    return time.clock_gettime(_ELAPSED)


class SystemClock:
    """Monotonic seconds for decisions, wall seconds for records that people read."""

    def monotonic_s(self) -> float:
        """Return seconds that never go backwards."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()  # noqa: TID251 - records for people, never for decisions
