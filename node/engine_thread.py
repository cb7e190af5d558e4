"""The one thread that runs MLX: decode everyone one step, then one prompt one chunk.

    calls and new work -> one decode step for all active -> one prefill chunk -> again

Warm prompts (little left to compute) go before cold ones; cold ones take turns.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from fabric.chunks import prefill_chunk_tokens
from fabric.errors import FabricError, OverloadedError
from fabric.generation import FinishReason, TokenLogprob
from fabric.limits import PREFILL_CHUNK_TOKENS_MIN
from fabric.ports import Clock
from node.mlx.engine import DecodeSlot, Drawn, Engine
from node.sequence import Broke, Ended, Produced, Sequence, Started
from node.speed import Speed

T = TypeVar("T")
_MEASURED_CHUNK_TOKENS = 128  # shorter ones measure the overhead, not the speed
_log = logging.getLogger(__name__)


class EngineThread:
    """Owns an Engine; every other thread talks to it through `call` and `submit`."""

    def __init__(
        self, clock: Clock, *, active_max: int, waiting_max: int, exact_chunks: bool
    ) -> None:
        self._clock = clock
        self._active_max = active_max
        self._waiting_max = waiting_max
        self._exact = exact_chunks
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._prefilling: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.prefill_speed = Speed()
        self.decode_speed = Speed()

    def start(self, build: Callable[[], tuple[Engine, T]]) -> T:
        """Start the thread, build the engine on it, and return what `build` says beside it."""
        self._thread.start()

        def adopt() -> T:
            self._engine, extra = build()
            return extra

        return self.call(adopt).result()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run `work` on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)

        self._post(run)
        return future

    @property
    def engine(self) -> Engine:
        """The engine; only for use inside `call`."""
        assert self._engine is not None, "the engine is not built yet"
        return self._engine

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; raise OverloadedError if the queue is full."""
        if self.waiting_count >= self._waiting_max:
            message = f"{self._waiting_max} requests are waiting on this node"
            raise OverloadedError(message)
        self._post(lambda: self._waiting.append(sequence))

    def wake(self) -> None:
        """Make an idle loop look around, e.g. after a cancellation."""
        self._post(lambda: None)

    def stop(self) -> None:
        """End the loop after the current step; running sequences end as cancelled."""
        self._post(self._begin_stop)
        self._thread.join()

    @property
    def waiting_count(self) -> int:
        """Sequences that have not started decoding."""
        return len(self._waiting) + len(self._prefilling)

    @property
    def active_count(self) -> int:
        """Sequences that are decoding."""
        return len(self._active)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed."""
        queued = [*self._waiting, *self._prefilling]
        return sum(max(sequence.prefill_left, 0) for sequence in queued)

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _begin_stop(self) -> None:
        self._stopping = True
        for sequence in [*self._waiting, *self._prefilling, *self._active]:
            sequence.cancelled.set()

    def _run(self) -> None:
        while True:
            self._take_inbox()
            self._drop_cancelled()
            if self._stopping:
                return
            self._admit()
            if self._active:
                self._decode()
            if self._prefilling:
                self._prefill()

    def _take_inbox(self) -> None:
        with self._wake:
            while not (self._inbox or self._active or self._prefilling or self._waiting):
                self._wake.wait()
            work = list(self._inbox)
            self._inbox.clear()
        for item in work:
            item()

    def _drop_cancelled(self) -> None:
        for queue in (self._waiting, self._prefilling, self._active):
            for sequence in [s for s in queue if s.cancelled.is_set()]:
                queue.remove(sequence)
                self._end(sequence, None)

    def _admit(self) -> None:
        while self._waiting and len(self._active) + len(self._prefilling) < self._active_max:
            sequence = self._waiting.popleft()
            if not self._activate(sequence):
                self._prefilling.append(sequence)

    def _activate(self, sequence: Sequence) -> bool:
        """Move a fully prefilled sequence to decoding; say whether it was."""
        if sequence.prefill_left > 0:
            return False
        sequence.slot = self.engine.start(
            sequence.cache, sequence.prompt, sequence.sampling, sequence.seed
        )
        self._active.append(sequence)
        sequence.emit(Started())
        return True

    def _prefill(self) -> None:
        sequence = self._next_prompt()
        position = sequence.cache.tokens_count
        count = prefill_chunk_tokens(
            position,
            sequence.prefill_left,
            largest=self.engine.chunk_tokens_max,
            busy=bool(self._active),
            exact=self._exact,
        )
        began = self._clock.monotonic_s()
        try:
            self.engine.prefill(sequence.cache, sequence.prompt[position : position + count])
        except Exception as error:  # noqa: BLE001 - one prompt's failure ends only itself
            self._prefilling.remove(sequence)
            self._break(sequence, error)
            return
        if count >= _MEASURED_CHUNK_TOKENS:
            self.prefill_speed.add(count, self._clock.monotonic_s() - began)
        if self._activate(sequence):
            self._prefilling.remove(sequence)

    def _next_prompt(self) -> Sequence:
        warm = min(self._prefilling, key=lambda sequence: sequence.prefill_left)
        if warm.prefill_left <= PREFILL_CHUNK_TOKENS_MIN:
            return warm
        self._prefilling.rotate(-1)
        return self._prefilling[-1]

    def _decode(self) -> None:
        began = self._clock.monotonic_s()
        fresh = any(s.slot is not None and not s.slot.pending_is_drawn for s in self._active)
        self._step()
        if fresh and self._active:
            self._step()  # a new sequence's first token is read right behind this one
        count = len(self._active)
        if count and not fresh:
            self.decode_speed.add(count, self._clock.monotonic_s() - began)

    def _step(self) -> None:
        slots = [_slot(sequence) for sequence in self._active]
        try:
            self.engine.launch(slots)
        except Exception:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a batch of %d failed; trying each sequence alone", len(slots))
            self._launch_alone()
        for sequence in list(self._active):
            try:
                for drawn in self.engine.read(_slot(sequence)):
                    self._deliver(sequence, drawn)
            except Exception as error:  # noqa: BLE001 - isolate the failing sequence
                if sequence in self._active:
                    self._active.remove(sequence)
                self._break(sequence, error)

    def _launch_alone(self) -> None:
        for sequence in list(self._active):
            try:
                self.engine.launch([_slot(sequence)])
            except Exception as error:  # noqa: BLE001 - isolate the failing sequence
                self._active.remove(sequence)
                self._break(sequence, error)

    def _deliver(self, sequence: Sequence, drawn: Drawn) -> None:
        if sequence not in self._active:
            return
        sequence.answer_ids.append(drawn.token)
        shown = sequence.answer.push(drawn.token)
        count = len(sequence.answer_ids)
        is_end = drawn.token in sequence.stop_ids and not sequence.sampling.ignore_eos
        logprobs = () if is_end else _logprobs(sequence, drawn)
        sequence.emit(Produced(count - 1, shown, logprobs))
        if is_end:
            self._finish(sequence, FinishReason.STOP)
        elif shown.stopped_by is not None:
            self._finish(sequence, FinishReason.STOP, shown.stopped_by)
        elif count >= sequence.sampling.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop_string: str | None = None
    ) -> None:
        self._active.remove(sequence)
        self._end(sequence, reason, stop_string)

    def _end(
        self, sequence: Sequence, reason: FinishReason | None, stop_string: str | None = None
    ) -> None:
        shown = sequence.answer.finish(stopped=stop_string is not None)
        answer = sequence.answer
        sequence.emit(
            Ended(reason, shown, sequence.answer_ids, answer.text, answer.ends, stop_string)
        )

    def _break(self, sequence: Sequence, error: Exception) -> None:
        _log.error("a sequence failed in the engine: %s", type(error).__name__, exc_info=error)
        message = "the engine failed on this request"
        failure = FabricError(message, code="engine_failed")
        sequence.emit(Broke(error if isinstance(error, FabricError) else failure))


def _slot(sequence: Sequence) -> DecodeSlot:
    assert sequence.slot is not None, "only activated sequences decode"
    return sequence.slot


def _logprobs(sequence: Sequence, drawn: Drawn) -> tuple[TokenLogprob, ...]:
    if not drawn.top:
        return ()
    spelled: list[tuple[str, Any]] = [(sequence.token_text(t), p) for t, p in drawn.top]
    (text, logprob), *rivals = spelled
    return (TokenLogprob(text, logprob, tuple(rivals)),)
