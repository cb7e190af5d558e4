"""The engine's loop as callbacks instead of a thread: the real scheduler, step by step."""

import asyncio

from node.engine.engine_thread import EngineThread
from node.limits import BLOCKED_POLL_S


class _WakeUp:
    """A replacement of the thread's condition: notifying it runs the loop."""

    def __init__(self, wake_up):
        self.notify = wake_up

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class EngineLoop(EngineThread):
    """An engine loop that iterates on every notification, and again after each step's time."""

    def __init__(self, clock, engine, **options):
        self._clock = clock
        super().__init__(clock, **options)
        self._loop = asyncio.get_running_loop()
        self._wake = _WakeUp(self._wake_up)
        self._scheduler.engine = engine
        self._poll = None
        self._is_scheduled = False  # a step is due, or being computed

    def _wake_up(self):
        if not self._is_scheduled:
            self._schedule(0.0)

    def _schedule(self, delay_s):
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None
        self._is_scheduled = True
        self._loop.call_later(delay_s, self._step)

    def _step(self):
        engine = self._scheduler.engine
        engine.spent_s = 0.0
        if not self._take_in(waits=False):
            self._finish()
            return
        is_useful = self._iterate()
        spent_s, engine.spent_s = engine.spent_s, 0.0
        if is_useful or self._has_work():
            self._schedule(spent_s)
            return
        self._is_scheduled = False
        if any(self._queue):
            self._poll = self._loop.call_later(BLOCKED_POLL_S, self._wake_up)


class EngineClock:
    """The process's clock, with the time that the step under way has taken so far."""

    def __init__(self, clock, engine):
        self._inner = clock
        self._engine = engine

    def monotonic_s(self):
        return self._inner.monotonic_s() + self._engine.spent_s

    def wall_s(self):
        return self._inner.wall_s() + self._engine.spent_s
