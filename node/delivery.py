"""Turn what the engine drew into a sequence's events: tokens, text, its end or its failure."""

import logging
from typing import Any

from fabric.errors import FabricError
from fabric.generation import FinishReason, TokenLogprob
from node.mlx.engine import Drawn
from node.sequence import Broke, Ended, Produced, Sequence, SequenceEvent

_log = logging.getLogger(__name__)


def tell(sequence: Sequence, event: SequenceEvent) -> None:
    """Emit an event; a sequence whose listener fails has none and is cancelled."""
    try:
        sequence.emit(event)
    except Exception:  # noqa: BLE001 - a listener's failure is not the batch's
        _log.exception("nobody listens to a sequence any more")
        sequence.cancelled.set()


def deliver(sequence: Sequence, drawn: Drawn) -> bool:
    """Take the next token and say whether it was the last."""
    resumed = sequence.resumed
    if resumed is not None and len(sequence.answer_ids) == len(resumed.answer_ids):
        drawn = Drawn(drawn.token, resumed.top)  # its probability was computed where it was drawn
    sequence.answer_ids.append(drawn.token)
    shown = sequence.answer.push(drawn.token)
    count = len(sequence.answer_ids)
    is_end = drawn.token in sequence.stop_ids and not sequence.sampling.ignore_eos
    logprobs = () if is_end else _logprobs(sequence, drawn)
    tell(sequence, Produced(count - 1, shown, logprobs))
    if is_end:
        end(sequence, FinishReason.STOP)
    elif shown.stopped_by is not None:
        end(sequence, FinishReason.STOP, shown.stopped_by)
    elif count >= sequence.sampling.max_tokens:
        end(sequence, FinishReason.LENGTH)
    else:
        return False
    return True


def end(sequence: Sequence, reason: FinishReason | None, stop_string: str | None = None) -> None:
    """Emit the last event of a sequence that did not fail; `reason` None: it was cancelled."""
    answer = sequence.answer
    try:
        shown = answer.finish(stopped=stop_string is not None)
    except Exception as error:  # noqa: BLE001 - the text of one sequence
        fail(sequence, error)
        return
    ended = Ended(reason, shown, sequence.answer_ids, answer.text, answer.ends, stop_string)
    tell(sequence, ended)


def hand_over(sequence: Sequence, drawn: Drawn | None) -> None:
    """Emit the last event of a sequence that goes on elsewhere, with the token drawn last."""
    answer = sequence.answer
    # What the answer holds back (half a character, the beginning of a stop string) is shown by
    # who goes on, whose answer is fed the same tokens.
    shown = answer.finish(stopped=True)
    ids, ends = sequence.answer_ids, answer.ends
    tell(sequence, Ended(None, shown, ids, answer.text, ends, None, is_handover=True, drawn=drawn))


def fail(sequence: Sequence, error: Exception) -> None:
    """Emit the last event of a sequence that failed."""
    _log.error("a sequence failed in the engine: %s", type(error).__name__, exc_info=error)
    message = "the engine failed on this request"
    failure = FabricError(message, code="engine_failed")
    tell(sequence, Broke(error if isinstance(error, FabricError) else failure))


def _logprobs(sequence: Sequence, drawn: Drawn) -> tuple[TokenLogprob, ...]:
    if not drawn.top:
        return ()
    spelled: list[tuple[str, Any]] = [(sequence.token_text(t), p) for t, p in drawn.top]
    (text, logprob), *rivals = spelled
    return (TokenLogprob(text, logprob, tuple(rivals)),)
