"""The one place of the node that reads a clock.

The router has its own (`router.clock`): what both could import is fabric, which reads none.
"""

import sys
import time

# Both count the time that the machine sleeps, and nobody sets them.
_ELAPSED = time.CLOCK_MONOTONIC if sys.platform == "darwin" else time.CLOCK_BOOTTIME


def elapsed_s() -> float:
    """Return seconds that pass in sleep, too, as `SystemClock.monotonic_s` does not."""
    return time.clock_gettime(_ELAPSED)


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        """Seconds that never go backwards."""
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()  # noqa: TID251 - records for people, never for decisions
