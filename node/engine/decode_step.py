"""Decode step of a batch, and the memory that each answer reserves before it.

A failing sequence ends alone; a device error ends the batch.

An answer reserves its next block a little early, so that idle caches can be dropped in time. If
no memory is left, one answer is preempted: it is saved, its memory is freed, and the router
resumes it with a new request, which waits for memory like any other.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Final

from fabric.limits import BLOCK_TOKENS
from node.engine.delivery import Last, deliver, end, fail
from node.engine.memory_budget import MemoryBudget, Reservation
from node.engine.sequence import Sequence
from node.mlx.device import DeviceError
from node.mlx.engine import DecodeSlot, Engine, PreparedStep, SampledToken

_log = logging.getLogger(__name__)


def decode_step(engine: Engine, batch: list[Sequence]) -> list[Sequence]:
    """Feed every sequence's pending token, deliver the sampled ones, return ended sequences.

    Raise DeviceError if the device failed: then no token that it computed since the last check was
    delivered.
    """
    step = _Step(engine, batch)
    if engine.launch_waits:  # a launch would delay the delivery of sampled tokens
        step.read()
        step.deliver()
        step.launch()
    else:  # prepare the next step while the device computes this one
        step.prepare()
        step.read()
        step.launch()
        step.deliver()
    return step.finish()


class _Step:
    def __init__(self, engine: Engine, batch: list[Sequence]) -> None:
        self._engine = engine
        self._batch = batch
        self._prepared: PreparedStep | None = None
        self._failed: list[Sequence] = []
        self._sampled: list[tuple[Sequence, SampledToken]] = []
        self._last: list[tuple[Sequence, Last]] = []

    def prepare(self) -> None:
        """Prepare the next step; a failure here occurs again at the launch."""
        if self._engine.is_opaque:  # its caches cannot undo a step
            return
        try:
            self._prepared = self._engine.prepare([_slot(sequence) for sequence in self._batch])
        except DeviceError:
            raise
        except Exception:  # noqa: BLE001 - it may be one sequence's
            _log.debug("a batch of %d cannot be prepared", len(self._batch), exc_info=True)

    def read(self) -> None:
        """Wait for the sampled tokens; none is delivered before all are checked."""
        for sequence in self._batch:
            with self._isolate_errors(sequence):
                sampled = self._engine.read(_slot(sequence))
                if sampled is not None:
                    self._sampled.append((sequence, sampled))
        self._engine.check()

    def deliver(self) -> None:
        """Deliver the sampled tokens of all sequences that have not failed."""
        for sequence, sampled in self._sampled:
            if sequence in self._failed:
                continue
            with self._isolate_errors(sequence):
                last = deliver(sequence, sampled)
                if last is not None:
                    self._last.append((sequence, last))

    def launch(self) -> None:
        """Launch all together or, if that fails or cannot be undone, each alone."""
        batch, step = self._remaining_sequences(), self._prepared
        if step is not None and len(batch) < len(self._batch):
            step.undo()
            step = None
        if not batch or (not self._engine.is_opaque and self._launch_together(batch, step)):
            return
        for sequence in batch:
            with self._isolate_errors(sequence):
                self._engine.launch(self._engine.prepare([_slot(sequence)]))

    def _launch_together(self, batch: list[Sequence], step: PreparedStep | None) -> bool:
        """Launch a batch; return whether it did not fail."""
        try:
            slots = [_slot(sequence) for sequence in batch]
            self._engine.launch(step or self._engine.prepare(slots))
        except DeviceError:
            raise
        except Exception:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a batch of %d failed; trying each sequence alone", len(batch))
            return False
        return True

    def finish(self) -> list[Sequence]:
        """End the sequences whose last token is in the cache; return them and the failed ones."""
        ended = [(sequence, last) for sequence, last in self._last if sequence not in self._failed]
        for sequence, last in ended:
            end(sequence, last.reason, last.stop_string)
        return [*self._failed, *(sequence for sequence, _ in ended)]

    def _remaining_sequences(self) -> list[Sequence]:
        return [sequence for sequence in self._batch if sequence not in self._failed]

    @contextmanager
    def _isolate_errors(self, sequence: Sequence) -> Iterator[None]:
        """End only this sequence on an error of its own; let a DeviceError pass."""
        try:
            yield
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001 - isolate the failing sequence
            fail(sequence, error)
            self._failed.append(sequence)


def _slot(sequence: Sequence) -> DecodeSlot:
    assert sequence.slot is not None, "only started sequences decode"
    return sequence.slot


ASK_AHEAD_TOKENS: Final = 32
STEPS_MAX: Final = 2  # steps of one iteration; each adds a token


class Growth(Enum):
    """Decision about a decoding sequence before its next step."""

    CONTINUE = auto()
    WAIT = auto()
    END = auto()


def grow(sequence: Sequence, held: Reservation, budget: MemoryBudget) -> Growth:
    """Reserve memory for another block if the answer nears the end of its own."""
    left = sequence.room_tokens - sequence.cache.tokens_count
    grown_bytes = sequence.input.grown_bytes
    if left >= ASK_AHEAD_TOKENS or grown_bytes is None or not _needs_more(sequence, left):
        return Growth.CONTINUE
    room_tokens = sequence.room_tokens + BLOCK_TOKENS
    size_bytes = grown_bytes(room_tokens)
    is_last = left < STEPS_MAX
    if size_bytes > budget.total_bytes:
        return Growth.END if is_last else Growth.CONTINUE
    has_grown = held.grow(size_bytes)
    if has_grown or is_last:
        sequence.room_tokens, sequence.reserve_bytes = room_tokens, size_bytes
    return Growth.CONTINUE if has_grown or not is_last else Growth.WAIT


def _needs_more(sequence: Sequence, left: int) -> bool:
    return sequence.input.sampling.max_tokens - len(sequence.answer_ids) >= left


def victim(sequences: Iterable[Sequence]) -> Sequence | None:
    """Choose the answer to preempt: background first, then the newest of the tenant with the most.

    So the oldest answer is never chosen, and finishes.
    """
    candidates = [s for s in sequences if s.can_yield and s.input.is_preemptible()]
    counts = Counter(sequence.tenant for sequence in candidates)
    return max(candidates, key=lambda s: (not s.is_urgent, counts[s.tenant], s.order), default=None)
