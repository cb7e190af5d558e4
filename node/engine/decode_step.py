"""Decode step of a batch: its tokens delivered, and the memory that answers reserve before it.

A failing sequence ends alone; a device error ends the batch. A sequence's listener receives the
text of its sampled tokens, then the answer's end or a failure.

An answer reserves its next block a little early, so that idle caches can be dropped in time. If
no memory is left, one answer is preempted: it is saved, its memory is freed, and the router
resumes it with a new request, which waits for memory like any other.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

from fabric.errors import EngineFailedError, FabricError
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import FinishReason, TokenLogprob
from node.dialect.answer_delta import AnswerDelta
from node.engine.memory_budget import MemoryBudget, Reservation
from node.engine.sequence import Broke, Ended, Produced, Sequence, SequenceEvent
from node.mlx.device import DeviceError, device_errors
from node.mlx.engine import DecodeSlot, Engine, PreparedStep, SampledToken
from node.mlx.sampling import Top

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Last:
    """End of an answer: the finish reason, and the stop string that ended it, if any."""

    reason: FinishReason
    stop_string: str | None


def emit_event(sequence: Sequence, event: SequenceEvent) -> None:
    """Emit an event; cancel the sequence if its listener raises."""
    try:
        sequence.emit(event)
    except Exception:  # noqa: BLE001 - a listener's failure is not the batch's
        _log.exception("the listener of a sequence failed; cancelling the sequence")
        sequence.cancelled.set()


def deliver(sequence: Sequence, sampled: SampledToken) -> Last | None:
    """Append and emit the next token; return the reason for `end` if the answer ends with it."""
    resumed, was_delivered = sequence.input.resumed, False
    if resumed is not None and len(sequence.answer_ids) == len(resumed.answer_ids):
        # The node that sampled it computed its probability, and perhaps delivered it.
        sampled, was_delivered = SampledToken(sampled.token, resumed.top), resumed.is_delivered
    sequence.answer_ids.append(sampled.token)
    if sequence.trimmed is not None and not _is_end(sequence, sampled.token):
        text = sequence.input.token_text(sampled.token)
        sequence.trimmed.follow(text, sequence.mark_before_read)
    shown = sequence.answer.push(sampled.token)
    event = produced_event(sequence, len(sequence.answer_ids), sampled, shown)
    emit_event(
        sequence, replace(event, logprobs=(), was_delivered=True) if was_delivered else event
    )
    reason = finish_reason(sequence, len(sequence.answer_ids), sampled.token, shown)
    if reason is None:
        return None
    return Last(reason, shown.stopped_by if reason is FinishReason.STOP else None)


def produced_event(
    sequence: Sequence, count: int, sampled: SampledToken, shown: AnswerDelta
) -> Produced:
    """Return the event of an answer's token number `count`, counted from 1."""
    return Produced(
        count - 1, shown, () if _is_end(sequence, sampled.token) else _logprobs(sequence, sampled)
    )


def finish_reason(
    sequence: Sequence, count: int, token: int, shown: AnswerDelta
) -> FinishReason | None:
    """Return why an answer ends with its `count`-th token, or None."""
    if _is_end(sequence, token) or shown.stopped_by is not None:
        return FinishReason.STOP
    return FinishReason.LENGTH if count >= sequence.input.sampling.max_tokens else None


def _is_end(sequence: Sequence, token: int) -> bool:
    return token in sequence.input.stop_ids and not sequence.input.sampling.ignore_eos


def end(sequence: Sequence, reason: FinishReason | None, stop_string: str | None = None) -> None:
    """Emit the last event of a sequence that did not fail; a cancelled one has no `reason`.

    Raise DeviceError if the state of a trimmed end could not be computed.
    """
    answer = sequence.answer
    try:
        is_cut = reason is FinishReason.LENGTH
        shown = answer.finish(stopped=stop_string is not None, is_cut=is_cut)
        if sequence.trimmed is not None:
            mark = sequence.trimmed.mark(has_calls=answer.reader.has_calls)
            if mark is not None:
                with device_errors():
                    sequence.cache.take_marked(mark)
    except DeviceError:
        raise
    except Exception as error:  # noqa: BLE001 - the text of one sequence
        fail(sequence, error)
        return
    ended = Ended(reason, shown, sequence.answer_ids, answer.text, answer.ends, stop_string)
    emit_event(sequence, ended)


def hand_over(sequence: Sequence, sampled: SampledToken | None) -> None:
    """Emit the last event of a sequence that another node continues, with the sampled token."""
    answer = sequence.answer
    # Read the token on a fork of the answer, because the record ends before it.
    ahead = answer.fork().push(sampled.token) if sampled is not None else None
    # Held-back text (half a character, the beginning of a stop string) is shown by the next node,
    # whose answer is fed the same tokens.
    shown = answer.finish(stopped=True)
    ids, ends = sequence.answer_ids, answer.ends
    is_preempted = sequence.is_preempted
    ended = Ended(None, shown, ids, answer.text, ends, None, True, sampled, ahead, is_preempted)
    emit_event(sequence, ended)


def fail(sequence: Sequence, error: Exception) -> None:
    """Emit the last event of a sequence that failed."""
    if not isinstance(error, EngineFailedError):  # logged once, for all sequences
        _log.error("a sequence failed in the engine: %s", type(error).__name__, exc_info=error)
    message = "the engine failed on this request; see the node's log"
    failure = FabricError(message, code="engine_failed")
    emit_event(sequence, Broke(error if isinstance(error, FabricError) else failure))


def note_scored(sequence: Sequence, tops: Iterable[Top]) -> None:
    """Keep the log probabilities of the prompt's tokens until they are sent."""
    assert sequence.scored is not None, "requested"
    sequence.scored.extend(_spelled(sequence, top) for top in tops)


def _logprobs(sequence: Sequence, sampled: SampledToken) -> tuple[TokenLogprob, ...]:
    return (_spelled(sequence, sampled.top),) if sampled.top else ()


def _spelled(sequence: Sequence, top: Top) -> TokenLogprob:
    spelled: list[tuple[str, Any]] = [(sequence.input.token_text(t), p) for t, p in top]
    (text, logprob), *alternatives = spelled
    return TokenLogprob(text, logprob, tuple(alternatives))


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
