"""Try a freshly loaded model on our caches before anyone depends on them."""

import logging

import mlx.core as mx

from fabric.errors import FatalError
from fabric.generation import Sampling
from node.mlx.engine import DecodeSlot, Engine

_log = logging.getLogger(__name__)
_PROMPTS = ([1] * 40, [2, 3, 4, 5, 6], [7] * 19)
_STEPS = 4


def probe(engine: Engine) -> None:
    """Decide whether batches may be ragged; raise FatalError if 4-bit caches do not work.

    An attention that works on the fetched arrays itself cannot take packed ones.
    """
    try:
        alone = [_decode(engine, [_slot(engine, prompt)])[0] for prompt in _PROMPTS]
    except Exception as error:
        message = f"this model's attention cannot use 4-bit caches yet ({error})"
        raise FatalError(message, code="unsupported_model") from error
    if not engine.can_batch:
        return
    try:
        together = _decode(engine, [_slot(engine, prompt) for prompt in _PROMPTS])
    except Exception:  # noqa: BLE001 - whatever it is, decoding one by one avoids it
        together = []
    if together != alone:
        _log.warning("sequences of this model are decoded one by one: batches differ")
        engine.can_batch = False


def _slot(engine: Engine, prompt: list[int]) -> DecodeSlot:
    cache = engine.new_cache(len(prompt) + _STEPS + 1)
    engine.prefill(cache, prompt[:-1])
    return engine.start(cache, prompt, Sampling(), 0)


def _decode(engine: Engine, slots: list[DecodeSlot]) -> list[list[int]]:
    for _ in range(_STEPS + 1):
        engine.launch(slots)
    mx.synchronize()
    return [[drawn.token for drawn in engine.read(slot)] for slot in slots]
