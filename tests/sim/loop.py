"""Event loop whose clock jumps to the next timer, with processes that can freeze or die.

Every callback runs in some process's context. A frozen process's callbacks wait until it
resumes, as with SIGSTOP; a dead one's are dropped, `finally` blocks included, as with SIGKILL.
"""

import asyncio
import heapq
import random
from asyncio import events
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import count, repeat

PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)
WORKER_DELAY_S = 0.0005


class PowerLostError(BaseException):
    """Raised inside a process that dies in the middle of a call."""


class StuckError(RuntimeError):
    """All tasks wait and no timer is set."""


@dataclass(eq=False)
class Process:
    """A program's life, with its own randomness; it may be frozen or dead."""

    name: str
    random: random.Random
    is_frozen: bool = False
    is_dead: bool = False
    stalled: list = field(default_factory=list)
    tasks: list = field(default_factory=list)

    def context(self):
        """Return a new context whose tasks belong to this process."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return context

    def admits(self, handle) -> bool:
        if self.is_dead or self.is_frozen:
            self.stalled.append(handle)  # of dead processes, too, for their cleanup
            return False
        return True


class _Handle(events.Handle):
    __slots__ = ()

    def _run(self):
        process = self._context.get(PROCESS)
        if process is None or self._loop.is_over or process.admits(self):
            events.Handle._run(self)


class _Timer(events.TimerHandle):
    __slots__ = ()
    _run = _Handle._run


def _outcome(func, args):
    try:
        return func(*args), None
    except (PowerLostError, Exception) as raised:  # noqa: BLE001 - the waiter gets it
        return None, raised


def _set_outcome(future, outcome, error):
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)


class _Selector:
    """A selector that moves the clock instead of waiting for sockets."""

    def __init__(self, loop):
        self._loop = loop

    def select(self, timeout):
        if timeout is None:
            message = "no task can continue"
            raise StuckError(message)
        self._loop.now_s += timeout
        return []


class _Task(asyncio.Task):
    """A task whose place in sets depends on the seed; asyncio's own depends on its address.

    The order in which tasks of a set are cancelled, or found done, follows from it.
    """

    def __init__(self, place, loop, work, options):
        self._place = place
        super().__init__(work, loop=loop, **options)

    def __hash__(self):
        return self._place

    def __eq__(self, other):
        return self is other


class SimLoop(asyncio.BaseEventLoop):
    """asyncio with simulated time, one thread and no sockets."""

    def __init__(self, seed=0):
        super().__init__()
        places = map(hash, zip(count(), repeat(seed)))
        self.set_task_factory(
            lambda loop, work, **options: _Task(next(places), loop, work, options)
        )
        self.now_s = 0.0
        self._clock_resolution = 1e-9
        self._selector = _Selector(self)
        self.extra_s = 0.0  # additional time that the current worker call takes
        self.workers = []  # calls under way whose steps interleave
        self.start_worker = None  # starts a call; without it calls run at once
        self.is_over = False  # during the cleanup: callbacks of dead processes run, too
        self.on_step = None  # called between two rounds of callbacks

    def end(self):
        """Stop the run, but not its cleanup."""
        if not self.is_over:
            self.stop()

    def time(self):
        return self.now_s

    def _run_once(self):
        super()._run_once()
        if self.on_step is not None:
            self.on_step()

    def _process_events(self, event_list):
        pass

    def _write_to_self(self):
        pass

    def _call_soon(self, callback, args, context):
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(self, delay, callback, *args, context=None):
        """Schedule a callback; a delay that rounding would lose still moves the clock."""
        delay = max(delay, self._clock_resolution) if delay > 0 else delay
        return super().call_later(delay, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def run_in_executor(self, executor, func, *args):
        """Run a worker's call at once, and deliver its outcome after the simulated time.

        With `start_worker` it runs a step at a time, and others run in between.
        """
        if self.start_worker is not None:
            return self.start_worker(lambda: func(*args), WORKER_DELAY_S)
        self.extra_s = 0.0
        # An error's traceback holds this frame: a local name of it would keep it for ever.
        return self._set_outcome_later(*_outcome(func, args))

    def _set_outcome_later(self, outcome, error):
        future = self.create_future()
        if not isinstance(error, PowerLostError):  # its caller is dead
            self.call_later(WORKER_DELAY_S + self.extra_s, _set_outcome, future, outcome, error)
        return future

    def spawn(self, process, work):
        """Start a task in a process."""
        task = self.create_task(work, context=process.context())
        process.tasks.append(task)
        return task

    def thaw(self, process):
        """Resume a frozen process: its waiting callbacks run now, in order."""
        process.is_frozen = False
        stalled, process.stalled = process.stalled, []
        self._ready.extend(handle for handle in stalled if not handle._cancelled)
