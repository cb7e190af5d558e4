"""The one place of the node that reads a clock.

The router has its own (`router.clock`): what both could import is fabric, which reads none.
"""

import time


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        """Seconds that never go backwards."""
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()  # noqa: TID251 - records for people, never for decisions
