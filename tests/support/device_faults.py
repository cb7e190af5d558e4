"""A device that fails as Metal does: at once, or later with garbage in between.

An operation that fails late computes something else; its error is stored, and raised once: by the
next synchronization, call of the model or evaluation of a cache on the same engine's thread.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from node.engine.engine_thread import EngineThread
from node.mlx import device
from node.mlx.device import DeviceError
from node.mlx.engine import Engine
from node.mlx.resident_cache import ResidentCache

MESSAGE = "[METAL] Command buffer execution failed: Insufficient Memory"
# The operation that fails: a call of the model, reading tokens, or work on a cache.
AT_ONCE = ("model", "read", "gather", "rest", "snapshot")
LATE = ("late model", "late gather")
NO_NUMBERS, NO_PROMPT = "nan", "nan prompt"
KINDS = (*AT_ONCE, *LATE, NO_NUMBERS, NO_PROMPT)
EVALUATING = ("rewind", "rearrange", "give_back_room", "take_marked")  # methods of caches


class DeviceFaults:
    """The faults of one engine; `arm` one at a time."""

    def __init__(self, engine: Engine) -> None:
        self.raised_count = 0
        self._armed: str | None = None
        self._left = 0
        self._stored = False
        self._thread = threading.get_ident()
        self._wrap(engine)

    def arm(self, kind: str, after_operations: int = 0) -> None:
        """Make an operation of this kind fail, after `after_operations` successful ones."""
        self._armed, self._left = kind, after_operations

    def disarm(self) -> None:
        self._armed = None

    @property
    def is_armed(self) -> bool:
        return self._armed is not None

    def _wrap(self, engine: Engine) -> None:
        model, read = engine.model, engine._sampled_token

        def call(tokens: mx.array, cache: Any) -> mx.array:
            self.raise_stored(RuntimeError)
            self.fail_at("model")
            if self.should_fail("late model"):
                self.store()
                return model(mx.zeros_like(tokens), cache=cache)
            if tokens.shape[1] > 1 and self.should_fail(NO_PROMPT):
                embedded = model.model.embed_tokens(tokens) * float("nan")
                return model(tokens, cache=cache, input_embeddings=embedded)
            logits = model(tokens, cache=cache)
            return logits * float("nan") if self.should_fail(NO_NUMBERS) else logits

        def sampled(*args: Any) -> Any:
            self.fail_at("read", DeviceError)
            return read(*args)

        engine.model = _Called(model, call)
        engine._sampled_token = sampled  # type: ignore[method-assign]

    def is_on_engine_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def raise_stored(self, kind: type[Exception]) -> None:
        if self._stored:
            self._stored = False
            self.raised_count += 1
            raise kind(MESSAGE)

    def fail_at(self, kind: str, error: type[Exception] = RuntimeError) -> None:
        if self.should_fail(kind):
            self.raised_count += 1
            raise error(MESSAGE)

    def store(self) -> None:
        self._stored = True

    def should_fail(self, kind: str) -> bool:
        """Return whether this operation is the one that fails."""
        if self._armed != kind or not self.is_on_engine_thread():
            return False
        self._left -= 1
        if self._left >= 0:
            return False
        self._armed = None
        return True


class _Called:
    """A model whose call is replaced."""

    def __init__(self, model: Any, call: Callable[..., mx.array]) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **named: Any) -> mx.array:
        return self._call(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextmanager
def injecting(
    faults: Sequence[DeviceFaults], rng: random.Random, count: int, operations_between_max: int
) -> Iterator[None]:
    """Arm one fault after another during a block of code, until `count` were raised."""
    over = threading.Event()

    def arm() -> None:
        while sum(each.raised_count for each in faults) < count and not over.is_set():
            for each in faults:
                if not each.is_armed:
                    each.arm(rng.choice(KINDS), rng.randrange(operations_between_max))
            over.wait(0.01)
        for each in faults:
            each.disarm()

    arming = threading.Thread(target=arm)
    arming.start()
    try:
        yield
    finally:
        over.set()
        arming.join()


@contextmanager
def failing_device(thread: EngineThread) -> Iterator[DeviceFaults]:
    """Make the device of an engine's thread fail."""
    with pytest.MonkeyPatch.context() as patch:
        faults = thread.call(lambda: DeviceFaults(thread.engine)).result()
        patch.setattr(device, "synchronize", _checking(faults, device.synchronize))
        for name, kind in {
            "gather": "gather",
            "rest": "rest",
            "take_snapshot": "snapshot",
        }.items():
            patch.setattr(ResidentCache, name, _failing(faults, kind, getattr(ResidentCache, name)))
        for name in EVALUATING:
            patch.setattr(ResidentCache, name, _evaluating(faults, getattr(ResidentCache, name)))
        yield faults


def _checking(faults: DeviceFaults, real: Callable[[], None]) -> Callable[[], None]:
    def check() -> None:
        if faults.is_on_engine_thread():
            faults.raise_stored(DeviceError)
        real()

    return check


def _evaluating(faults: DeviceFaults, real: Callable[..., Any]) -> Callable[..., Any]:
    def work(*args: Any, **named: Any) -> Any:
        if faults.is_on_engine_thread():
            faults.raise_stored(RuntimeError)
        return real(*args, **named)

    return work


def _failing(faults: DeviceFaults, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def work(*args: Any, **named: Any) -> Any:
        faults.fail_at(kind)
        if kind == "gather" and faults.should_fail("late gather"):
            faults.store()
            return memoryview(bytes(len(real(*args, **named))))
        return real(*args, **named)

    return work
