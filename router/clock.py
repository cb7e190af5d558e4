"""The machine's own clock behind `fabric.ports.Clock`."""

import time
from datetime import UTC, datetime


class SystemClock:
    """Monotonic seconds for decisions, wall seconds for records that people read."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return datetime.now(UTC).timestamp()
