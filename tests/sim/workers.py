"""Worker threads that take turns: one runs until its next disk access, then any other may.

Each call of a worker runs in a thread of its own, but only one thread of all runs at a time, and
the simulated clock decides which one continues. So a seed's life stays the same while two workers,
or a worker and the event loop, meet in the middle of their work. Locks are simulated, too: a
thread that waits for one lets the others continue.
"""

import asyncio
import contextlib
import sys
import threading
from contextvars import copy_context
from unittest import mock

from tests.sim.loop import PROCESS, PowerLostError

_IDLE_THREADS = []  # for the next call of any life


class _Thread:
    """A real thread that runs one task after another, only when resumed."""

    def __init__(self):
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.work = None
        threading.Thread(target=self._run, daemon=True, name="simulated worker").start()

    def _run(self):
        while True:
            self._go.acquire()
            self.work()
            self._back.release()

    def resume(self):
        """Let the thread run until it pauses or ends; called by the running thread."""
        self._go.release()
        self._back.acquire()

    def pause(self):
        """Let the caller of `resume` run; called on the thread."""
        self._back.release()
        self._go.acquire()


class Worker:
    """One call under way."""

    running: "Worker | None" = None  # the one running now; None: the event loop

    def __init__(self, loop, work):
        self._loop = loop
        self._work = work
        self._context = copy_context()
        self.process = PROCESS.get()
        self._thread = _IDLE_THREADS.pop() if _IDLE_THREADS else _Thread()
        self._thread.work = self._do
        self._round = 0  # only the first of two wake-ups for one pause counts
        self._is_atomic = 0
        self.is_doomed = False  # its process is dead: it only unwinds
        self.is_over = False
        self.future = loop.create_future()

    def start(self, delay_s):
        self._loop.workers.append(self)
        self._loop.call_later(delay_s, self._wake, self._round)

    def _do(self):
        self._context.run(self._work_once)

    def _work_once(self):
        outcome = error = None
        try:
            if not self.is_doomed:
                outcome = self._work()
        except PowerLostError:
            self.is_doomed = True
        except Exception as raised:  # noqa: BLE001 - the waiter gets it
            error = raised
        self.is_over = True
        if not self.is_doomed:
            self._loop.call_soon(self._set_outcome, outcome, error)
        del error  # which holds this frame

    def _set_outcome(self, outcome, error):
        if self.future.cancelled():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(outcome)
        del self.future  # unused from here on, and an error would keep its frame alive

    def _wake(self, number):
        if number == self._round and not self.is_over:
            self.run_on()

    def run_on(self):
        """Run until the next pause; the caller waits meanwhile."""
        self._round += 1
        before, Worker.running = Worker.running, self
        try:
            self._thread.resume()
        finally:
            Worker.running = before
        if self.is_over:
            self._loop.workers.remove(self)
            self._work = self._thread.work = None  # they hold caches
            _IDLE_THREADS.append(self._thread)

    # --- on the thread -----------------------------------------------------------------------

    def pause(self, delay_s):
        """Pause this worker for so long."""
        if self._is_atomic or self.is_doomed:
            return
        self._loop.call_later(delay_s, self._wake, self._round)
        self._wait()

    def wait(self):
        """Block this worker until `wake_soon` is called."""
        if self.is_doomed:
            raise PowerLostError
        self._wait()

    def wake_soon(self):
        self._context.copy().run(self._loop.call_soon, self._wake, self._round)

    def _wait(self):
        self._thread.pause()
        if self.is_doomed:
            raise PowerLostError

    @contextlib.contextmanager
    def atomic(self):
        """Run a block without interruption by other workers."""
        self._is_atomic += 1
        try:
            yield
        finally:
            self._is_atomic -= 1


def pause(delay_s):
    """Pause the calling worker for so long; do nothing in other threads."""
    if Worker.running is not None:
        Worker.running.pause(delay_s)


def atomic():
    """Run a block without interruption by other workers."""
    return Worker.running.atomic() if Worker.running is not None else contextlib.nullcontext()


def unwind(loop):
    """End all workers: each raises PowerLostError where it waits."""
    for worker in list(loop.workers):
        worker.is_doomed = True
        while not worker.is_over:
            worker.run_on()


class SimCondition:
    """threading.Condition for simulated threads, with its reentrant lock."""

    def __init__(self, lock=None):
        self._owner = None
        self._depth = 0
        self._waiting = []

    def acquire(self, blocking=True, timeout=-1):
        me = Worker.running
        if self._depth and self._owner is me and not self._is_plain:
            self._depth += 1
            return True
        while self._depth:
            if not blocking:
                return False
            self._block(me)
        self._owner, self._depth = me, 1
        return True

    _is_plain = False

    def _block(self, me):
        if me is not None:
            self._waiting.append(me)
            me.wait()
            return
        # The event loop blocks until the lock is free, as a real one would.
        assert self._owner is not None, "the event loop waits for itself"
        self._owner.run_on()
        if self._depth:  # the owner waits, too
            _run_waiting_workers()

    def release(self):
        if self._owner is not Worker.running and Worker.running is not None:
            assert Worker.running.is_doomed, "only the owner releases a lock"
            return
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self.notify_all()

    def notify_all(self):
        waiting, self._waiting = self._waiting, []
        for worker in waiting:
            worker.wake_soon()

    notify = notify_all

    def wait_for(self, predicate, timeout=None):
        me = Worker.running
        while not predicate():
            depth, self._depth, self._owner = self._depth, 0, None
            if me is not None:
                self._waiting.append(me)
                me.wait()
            else:
                _run_waiting_workers()
            while self._depth:
                self._block(me)
            self._owner, self._depth = me, depth
        return True

    def locked(self):
        return self._depth > 0

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *_):
        self.release()


class SimLock(SimCondition):
    """threading.Lock for simulated threads."""

    _is_plain = True


def _run_waiting_workers():
    """Run the workers of this process, for which the event loop waits, oldest first."""
    process, loop = PROCESS.get(), asyncio.get_running_loop()
    workers = [worker for worker in loop.workers if worker.process is process]
    assert workers, "the event loop waits without any worker"
    for worker in workers:
        if not worker.is_over:
            worker.run_on()


class _Threading:
    """The module `threading` with simulated locks."""

    Lock, RLock, Condition = SimLock, SimCondition, SimCondition

    def __getattr__(self, name):
        return getattr(threading, name)


@contextlib.contextmanager
def simulated_locks():
    """Give the node's modules simulated locks, as they import them."""
    fake = _Threading()
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith("node."):
                continue
            if vars(module).get("threading") is threading:
                stack.enter_context(mock.patch.object(module, "threading", fake))
            for kind in ("Lock", "RLock", "Condition"):
                if vars(module).get(kind) is getattr(threading, kind):
                    stack.enter_context(mock.patch.object(module, kind, getattr(fake, kind)))
        yield
