"""One decode step of a batch, in which one sequence's failure is nobody else's."""

import logging

from node.delivery import deliver, fail
from node.mlx.engine import DecodeSlot, Engine
from node.sequence import Sequence

_log = logging.getLogger(__name__)


def decode_step(engine: Engine, batch: list[Sequence]) -> list[Sequence]:
    """Feed every sequence's pending token, deliver what was drawn, and return who is done."""
    done = _launch(engine, batch)
    for sequence in batch:
        if sequence in done:
            continue
        try:
            is_last = any(deliver(sequence, drawn) for drawn in engine.read(_slot(sequence)))
        except Exception as error:  # noqa: BLE001 - isolate the failing sequence
            fail(sequence, error)
            is_last = True
        if is_last:
            done.append(sequence)
    return done


def _launch(engine: Engine, batch: list[Sequence]) -> list[Sequence]:
    """Launch all together or, where that fails, each alone; return those that failed."""
    try:
        engine.launch([_slot(sequence) for sequence in batch])
    except Exception:  # noqa: BLE001 - nothing may end the loop
        _log.exception("a batch of %d failed; trying each sequence alone", len(batch))
    else:
        return []
    failed = []
    for sequence in batch:
        try:
            engine.launch([_slot(sequence)])
        except Exception as error:  # noqa: BLE001 - isolate the failing sequence
            fail(sequence, error)
            failed.append(sequence)
    return failed


def _slot(sequence: Sequence) -> DecodeSlot:
    assert sequence.slot is not None, "only started sequences decode"
    return sequence.slot
