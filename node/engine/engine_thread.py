"""The one thread that runs MLX: in a loop, calls of other threads, then one scheduler iteration.

Other threads use `call`, `submit` and `wake`. No failure of a sequence, its callbacks or its
listener ends the loop. A device error ends all sequences; several in a minute end the process,
which starts again from the disk.
"""

import asyncio
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from fabric.errors import EngineFailedError, OverloadedError, RetryLaterError
from fabric.ports import Clock
from fabric.turn.generation import Priority
from node.engine.memory_budget import MemoryBudget
from node.engine.moving_streams import MovingStreams
from node.engine.run_queue import refusal, retry_after_s
from node.engine.scheduler import Scheduler
from node.engine.sequence import Sequence
from node.limits import (
    BLOCKED_POLL_S,
    DEVICE_FAILURES_MAX,
    DEVICE_FAILURES_WITHIN_S,
    DEVICE_POOL_IDLE_S,
    ENGINE_CALLS_MAX,
)
from node.machine import ask_for_fast_cores
from node.mlx.device import DeviceError, device_errors
from node.mlx.engine import Engine

T = TypeVar("T")
_log = logging.getLogger(__name__)


class EngineThread:
    """Owner of an Engine; other threads reach it through `call` and `submit`."""

    def __init__(
        self,
        clock: Clock,
        *,
        active_max: int,
        waiting_max: int,
        exact_chunks: bool,
        budget: MemoryBudget | None = None,
        end_process: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the thread; `end_process` is called when the device keeps failing."""
        self.budget = budget or MemoryBudget(sys.maxsize)
        self._waiting_max = waiting_max
        self.moving = MovingStreams(clock)
        self._scheduler = Scheduler(
            clock,
            self.budget,
            active_max=active_max,
            exact_chunks=exact_chunks,
            moving=self.moving,
        )
        self._queue = self._scheduler.queue
        self.heads = self._scheduler.heads
        self.prefill_speed = self._scheduler.prefill_speed
        self.decode_speed = self._scheduler.decode_speed  # of all decoding sequences together
        self._clock = clock
        self._end_process = end_process
        self._failed_s: deque[float] = deque(maxlen=DEVICE_FAILURES_MAX)
        self.failures_count = 0  # device failures; turns begun before the last one are not saved
        self._wake = threading.Condition()
        # Under the lock of _wake:
        self._calls: deque[Callable[[], None]] = deque()
        self._arrivals: list[Sequence] = []
        self._is_woken = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, build: Callable[[], tuple[Engine, T]]) -> T:
        """Start the thread, build the engine on it, and return the other result of `build`."""
        self._thread.start()

        def adopt() -> T:
            self._scheduler.engine, extra = build()
            return extra

        return self.call(adopt).result()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` on the engine thread between two steps; raise OverloadedError if full.

        The future raises EngineFailedError if the device failed, perhaps at earlier work.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._call_guarded(work))
            except EngineFailedError as error:  # its traceback would keep the caller's cache alive
                future.set_exception(error.with_traceback(None))
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)

        with self._wake:
            self._refuse_stopping()
            if len(self._calls) >= ENGINE_CALLS_MAX:
                message = (
                    f"{ENGINE_CALLS_MAX} calls already wait for this node's engine; retry later"
                )
                raise OverloadedError(message)
            self._calls.append(run)
            self._wake.notify()
        return future

    async def between_steps(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread; for the event loop."""
        return await asyncio.wrap_future(self.call(work))

    async def compute(self, work: Callable[[], T], failures_count: int) -> T:
        """Run `work` on the engine thread; return its result once all of it is computed.

        Raise EngineFailedError if the device failed, now or since it had failed `failures_count`
        times.
        """
        return await self.between_steps(lambda: self._check_result(work, failures_count))

    async def return_unused(self) -> None:
        """Return the memory of freed arrays to the system."""
        await self.between_steps(self._scheduler.return_unused)

    def _check_result(self, work: Callable[[], T], failures_count: int) -> T:
        result = work()
        self.engine.check()
        if self.failures_count != failures_count:
            raise EngineFailedError
        return result

    def _call_guarded(self, work: Callable[[], T]) -> T:
        if self._scheduler.engine is None:  # the engine is being built
            return work()
        try:
            with device_errors():
                return work()
        except DeviceError as error:
            self._end_running(error)
        raise EngineFailedError  # not chained: the cause's traceback would keep a cache alive

    @property
    def engine(self) -> Engine:
        """The engine; only for use inside `call`."""
        assert self._scheduler.engine is not None, "the engine is not built yet"
        return self._scheduler.engine

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raise OverloadedError if the queue or the tenant's part of it is full, and RejectedError if
        the cache would not fit in memory even alone.
        """
        self.budget.check(sequence.reserve_bytes)
        with self._wake:
            self._refuse_stopping()
            if not sequence.input.was_admitted:
                self._refuse_full(sequence.tenant, sequence.priority)
            self._arrivals.append(sequence)
            self._wake.notify()

    def check_waiting(self, tenant: str, priority: Priority) -> None:
        """Raise OverloadedError if a sequence submitted now would be refused."""
        with self._wake:
            self._refuse_full(tenant, priority)

    def wake(self) -> None:
        """Wake an idle loop, e.g. after a cancellation or freed memory."""
        with self._wake:
            self._is_woken = True
            self._wake.notify()

    def stop(self) -> None:
        """End the loop after the current iteration; sequences end as cancelled."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def waiting_count(self) -> int:
        """Sequences that have not started decoding, or are paused."""
        return len(self._arrivals) + len(self._queue.undecoded)

    @property
    def unplaced_count(self) -> int:
        """Sequences that wait for a slot or for memory."""
        return len(self._arrivals) + len(self._queue.waiting) + len(self._queue.paused)

    @property
    def active_count(self) -> int:
        return len(self._queue.decoding)

    @property
    def preempted_count(self) -> int:
        """How often a sequence was paused for another one, since the start."""
        return self._scheduler.preempted_count

    @property
    def queued_tokens(self) -> int:
        queued = [*self._arrivals, *self._queue.undecoded]
        return sum(sequence.queued_tokens for sequence in queued)

    def _refuse_stopping(self) -> None:
        if self._is_stopping:
            message = "this node is stopping"
            raise RetryLaterError(message, code="stopping")

    def _refuse_full(self, tenant: str, priority: Priority) -> None:
        queued = [*self._arrivals, *self._queue.undecoded]
        reason = refusal(queued, tenant, priority, self._waiting_max)
        if reason is not None:
            message = f"{reason}: send fewer at once, or retry this one after Retry-After seconds"
            raise OverloadedError(message, retry_after_s=self.retry_after_s(len(queued)))

    def retry_after_s(self, waiting_count: int, places: int | None = None) -> float:
        """Estimate when one of `waiting_count` requests gets one of `places`, or of all, slots."""
        running_count = len(self._queue.running) if places is None else places
        return retry_after_s(waiting_count, running_count, self._scheduler.turn_speed.per_s)

    def _run(self) -> None:
        ask_for_fast_cores()
        is_useful = True
        while self._take_in(waits=not is_useful):
            is_useful = self._iterate()
        self._finish()

    def _iterate(self) -> bool:
        """Run one iteration; return whether there was anything to do."""
        try:
            return self._scheduler.iterate()
        except DeviceError as error:
            self._end_running(error)
            return True
        except Exception as error:  # noqa: BLE001 - nothing may end the loop
            _log.exception("an iteration failed; ending its sequences")
            self._scheduler.fail_all(error)
            return True

    def _end_running(self, error: DeviceError) -> None:
        """End all sequences after a device error; recover, or end the process."""
        _log.error("the device failed: %s; ending all sequences", error, exc_info=error)
        self.failures_count += 1
        self._failed_s.append(self._clock.monotonic_s())
        self._scheduler.fail_all(error)
        try:
            self.engine.recover()
        except DeviceError:
            _log.exception("the device does not recover")
            self._end_process()
            return
        is_full = len(self._failed_s) == DEVICE_FAILURES_MAX
        if is_full and self._failed_s[-1] - self._failed_s[0] <= DEVICE_FAILURES_WITHIN_S:
            _log.error(
                "the device failed %d times in %.0f s: ending the process",
                DEVICE_FAILURES_MAX,
                DEVICE_FAILURES_WITHIN_S,
            )
            self._end_process()

    def _take_in(self, *, waits: bool) -> bool:
        """Run calls and queue arrivals; wait for any if `waits`; return False to stop."""
        if waits:
            self._wait()
        with self._wake:
            self._is_woken = False
            calls, arrivals = list(self._calls), self._arrivals
            self._calls.clear()
            self._arrivals = []
            is_stopping = self._is_stopping
            for sequence in arrivals:
                self._scheduler.add(sequence)
        for call in calls:
            call()
        return not is_stopping

    def _wait(self) -> None:
        """Wait for work; if none comes in time, return the memory of freed arrays once."""
        with self._wake:
            if any(self._queue):
                # Blocked sequences may become runnable without a notification.
                self._wake.wait_for(self._has_work, BLOCKED_POLL_S)
                return
            if self._wake.wait_for(self._has_work, DEVICE_POOL_IDLE_S):
                return
        if self._scheduler.engine is not None:
            try:
                self.engine.return_unused()
            except DeviceError as error:
                self._end_running(error)
        with self._wake:
            self._wake.wait_for(self._has_work)

    def _has_work(self) -> bool:
        return bool(self._calls or self._arrivals or self._is_woken or self._is_stopping)

    def _finish(self) -> None:
        for sequence in self._queue:
            sequence.cancelled.set()
        self._scheduler.end_all()
