"""One decode step of a batch: a failing sequence ends alone, a device error ends the batch."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from node.engine.delivery import Last, deliver, end, fail
from node.engine.sequence import Sequence
from node.mlx.device import DeviceError
from node.mlx.engine import DecodeSlot, Engine, SampledToken

_log = logging.getLogger(__name__)


def decode_step(engine: Engine, batch: list[Sequence]) -> list[Sequence]:
    """Feed every sequence's pending token, deliver what was sampled, and return who is done.

    Raise DeviceError where the device failed: then nothing that it computed since the last check
    was delivered.
    """
    step = _Step(engine, batch)
    if engine.launch_waits:  # what is sampled already would be shown only after the computing
        step.read(engine.read_ahead)
        engine.check()
        step.deliver()
        step.launch()
    else:  # reading would hold up the device, which has the next step to begin
        step.launch()
        step.read(engine.read)
        engine.check()
        step.deliver()
    return step.finish()


class _Step:
    def __init__(self, engine: Engine, batch: list[Sequence]) -> None:
        self._engine = engine
        self._batch = batch
        self._failed: list[Sequence] = []
        self._sampled: list[tuple[Sequence, list[SampledToken]]] = []
        self._last: list[tuple[Sequence, Last]] = []

    def read(self, read: Callable[[DecodeSlot], list[SampledToken]]) -> None:
        """Wait for what was sampled; nothing of it is delivered before all of it is checked."""
        for sequence in self._sound():
            with self._isolated(sequence):
                self._sampled.append((sequence, read(_slot(sequence))))

    def deliver(self) -> None:
        for sequence, tokens in self._sampled:
            with self._isolated(sequence):
                for sampled in tokens:
                    last = deliver(sequence, sampled)
                    if last is not None:
                        self._last.append((sequence, last))
                        break

    def launch(self) -> None:
        """Launch all together or, where that fails, each alone."""
        batch = self._sound()
        if not batch:
            return
        try:
            self._engine.launch([_slot(sequence) for sequence in batch])
        except DeviceError:
            raise
        except Exception:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a batch of %d failed; trying each sequence alone", len(batch))
        else:
            return
        for sequence in batch:
            with self._isolated(sequence):
                self._engine.launch([_slot(sequence)])

    def finish(self) -> list[Sequence]:
        """End those whose last token is in the cache now; return them and who failed."""
        ended = [(sequence, last) for sequence, last in self._last if sequence not in self._failed]
        for sequence, last in ended:
            end(sequence, last.reason, last.stop_string)
        return [*self._failed, *(sequence for sequence, _ in ended)]

    def _sound(self) -> list[Sequence]:
        return [sequence for sequence in self._batch if sequence not in self._failed]

    @contextmanager
    def _isolated(self, sequence: Sequence) -> Iterator[None]:
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
