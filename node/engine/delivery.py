"""Events of a sequence: text of sampled tokens, the answer's end, or a failure."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fabric.errors import EngineFailedError, FabricError
from fabric.turn.generation import FinishReason, TokenLogprob
from node.dialect.answer_delta import AnswerDelta
from node.engine.sequence import Broke, Ended, Produced, Sequence, SequenceEvent
from node.mlx.device import DeviceError, device_errors
from node.mlx.engine import SampledToken
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
            mark = sequence.trimmed.mark(has_calls=answer.has_calls)
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
