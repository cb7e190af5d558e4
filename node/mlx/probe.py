"""Try a freshly loaded model on our caches before anyone depends on them.

1. With caches of full precision it must compute what it does with mlx-lm's own.
2. Quantized, packed attention must agree with attention over the unpacked numbers; where it
   cannot even run, the attention computes with what it fetches, and gets plain numbers.
3. Sequences decoded together must agree with each alone.

A model that fails the first is served without reuse; the others only cost speed.
"""

import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from fabric.cache_spec import NATIVE, LayerKind, LayerSpec, ModelCacheSpec
from fabric.errors import FatalError
from fabric.settings import KvBits
from node.mlx.engine import Batching, Engine
from node.mlx.model_spec import read_spec, with_rotations
from node.mlx.rotation_probe import read_rotations

_log = logging.getLogger(__name__)
_LENGTHS = (40, 33)  # close enough to be padded to one length
_STEPS = 2
_WINDOW_TOKENS_MAX = 128  # narrower windows are tried past their end; wider ones take too long
# Largest difference of a logit, by the largest logit. 16-bit models round in every layer.
_TOLERANCE = {"F32": 2e-3, "F16": 5e-2, "BF16": 1e-1}


def fit_engine(model: Any, bits: KvBits) -> Engine:
    """Find the caches that serve `model`; raise FatalError where none of ours does."""
    exact = read_spec(model, KvBits(NATIVE, NATIVE, NATIVE))
    prompts = _prompts(exact)
    reference = [_stock_logits(model, prompt) for prompt in prompts]
    tolerance = _tolerance(exact)
    try:
        ours = _alone(Engine(model, exact), prompts)
    except Exception as error:
        message = f"the model does not run on our caches ({type(error).__name__}: {error})"
        raise FatalError(message, code="unsupported_model") from error
    if not _agree(ours, reference, tolerance):
        message = "the model computes something else on our caches than on mlx-lm's"
        raise FatalError(message, code="unsupported_model")
    spec = with_rotations(read_spec(model, bits), read_rotations(model))
    engine, alone = _quantized(model, spec, bits, prompts, tolerance)
    engine.batching = _batching(engine, prompts, alone, tolerance)
    return engine


def _prompts(spec: ModelCacheSpec) -> list[list[int]]:
    lengths = list(_LENGTHS)
    if 0 < spec.window_tokens <= _WINDOW_TOKENS_MAX:
        lengths[0] += spec.window_tokens
    # Small ids: an embedding read past its end is garbage, and differs each time.
    return [[1 + (7 * at + length) % 31 for at in range(length)] for length in lengths]


def _tolerance(spec: ModelCacheSpec) -> float:
    names = {slot.dtype for layer in spec.layers for slot in layer.slots}
    names |= {state.dtype for layer in spec.layers for state in layer.states}
    return max((_TOLERANCE.get(name, 0.0) for name in names - {"F32"}), default=_TOLERANCE["F32"])


def _stock_logits(model: Any, prompt: list[int]) -> mx.array:
    caches = make_prompt_cache(model)
    model(mx.array([prompt[:-_STEPS]]), cache=caches)
    rows = [model(mx.array([[token]]), cache=caches)[:, -1] for token in prompt[-_STEPS:]]
    out = mx.concatenate(rows).astype(mx.float32)
    mx.eval(out)
    return out


def _alone(engine: Engine, prompts: list[list[int]]) -> list[mx.array]:
    return [_logits(engine, [prompt])[0] for prompt in prompts]


def _logits(engine: Engine, prompts: list[list[int]]) -> list[mx.array]:
    """Feed the prompts' last tokens together; return `[steps, vocabulary]` for each."""
    caches = [engine.new_cache(len(prompt)) for prompt in prompts]
    for cache, prompt in zip(caches, prompts, strict=True):
        engine.prefill(cache, prompt[:-_STEPS])
    steps = []
    for step in range(_STEPS):
        tokens = [mx.array([prompt[step - _STEPS]], mx.uint32) for prompt in prompts]
        steps.append(engine.feed(caches, tokens).astype(mx.float32))
        mx.eval(steps[-1])
    return [mx.stack([rows[index] for rows in steps]) for index in range(len(prompts))]


def _agree(ours: list[mx.array], theirs: list[mx.array], tolerance: float) -> bool:
    for one, other in zip(ours, theirs, strict=True):
        off = mx.abs(one - other).max().item()
        if not off <= tolerance * mx.abs(other).max().item():  # a NaN is no agreement either
            return False
    return True


def _quantized(
    model: Any,
    spec: ModelCacheSpec,
    bits: KvBits,
    prompts: list[list[int]],
    tolerance: float,
) -> tuple[Engine, list[mx.array]]:
    """Return an engine on quantized caches, and its logits for each prompt alone."""
    unpacked = Engine(model, spec, packed=False)
    reference = _alone(unpacked, prompts)
    packed = Engine(model, spec, packed=True)
    try:
        alone = _alone(packed, prompts)
        if _agree(alone, reference, tolerance):
            return packed, alone
        _log.warning("packed attention differs from plain attention: using plain numbers")
    except Exception as error:  # noqa: BLE001 - whatever it is, plain numbers avoid it
        _log.info("attention takes no packed caches (%s)", type(error).__name__)
    layers = tuple(_latent(layer, bits) for layer in spec.layers)
    if layers == spec.layers:
        return unpacked, reference
    engine = Engine(model, replace(spec, layers=layers), packed=False)
    return engine, _alone(engine, prompts)


def _latent(layer: LayerSpec, bits: KvBits) -> LayerSpec:
    """Take a layer for a latent: one head, two widths, and arithmetic on what is fetched."""
    heads = {slot.heads for slot in layer.slots}
    widths = {slot.width for slot in layer.slots}
    if layer.kind is not LayerKind.FULL or heads != {1} or len(widths) != len(layer.slots):
        return layer
    group = layer.slots[0].group_size if bits.latent != NATIVE else 0
    slots = tuple(replace(slot, bits=bits.latent, group_size=group) for slot in layer.slots)
    return replace(layer, kind=LayerKind.LATENT, slots=slots)


def _batching(
    engine: Engine, prompts: list[list[int]], alone: list[mx.array], tolerance: float
) -> Batching:
    for batching in (Batching.RAGGED, Batching.PADDED):
        engine.batching = batching
        try:
            if _agree(_logits(engine, prompts), alone, tolerance):
                return batching
            _log.warning("%s batches differ from sequences alone", batching)
        except Exception as error:  # noqa: BLE001 - whatever it is, decoding alone avoids it
            _log.info("no %s batches (%s)", batching, type(error).__name__)
    return Batching.ALONE
