"""fabric.ports.Clock over the simulated time; each process has its own origin."""

WALL_S = 1_700_000_000.0


class SimClock:
    """The loop's time, shifted; the calendar is shared."""

    def __init__(self, loop, offset_s=0.0):
        self._loop = loop
        self.offset_s = offset_s

    def monotonic_s(self):
        return self._loop.now_s + self.offset_s

    def wall_s(self):
        return WALL_S + self._loop.now_s
