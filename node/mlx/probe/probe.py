"""Trial of a loaded model on our caches, before they are used.

1. With caches of full precision it must compute the same as with mlx-lm's own.
2. Quantized, packed attention must agree with attention over the unpacked numbers; if it does not
   run, attention gets plain numbers.
3. Sequences decoded together must agree with each alone.

A model that fails the first is served without reuse; failing the others only costs speed.
"""

import logging
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from fabric.errors import CorruptDataError, FatalError
from fabric.ids import Fingerprint
from fabric.kvcache.cache_spec import NATIVE, LayerKind, LayerSpec, ModelCacheSpec
from fabric.record.spec_file import SpecRecord, encode_spec
from fabric.settings import KvBits
from node.mlx import attention, backend
from node.mlx.attention import AttentionCall
from node.mlx.engine import Engine
from node.mlx.model_limits import ModelLimits, read_limits
from node.mlx.model_spec import read_spec, with_rotations
from node.mlx.probe.batch_probe import STEPS, agree, decode_alone, find_batching, prompt_of
from node.mlx.probe.rotation_probe import read_rotations

_log = logging.getLogger(__name__)
_LENGTHS = (40, 33)  # close enough to be padded to one length
_WINDOW_TOKENS_MAX = 128  # narrower windows are tried past their end; wider ones take too long
# Largest difference of a logit, by the largest logit. 16-bit models round in every layer.
_TOLERANCE = {"F32": 2e-3, "F16": 5e-2, "BF16": 1e-1}


def fit_engine(model: Any, bits: KvBits, limits: ModelLimits | None = None) -> Engine:
    """Return an engine with caches that suit `model`; raise FatalError if none of ours does."""
    limits = limits or read_limits(model)
    try:
        return _fit(model, bits, limits)
    except FatalError:
        raise
    except Exception as error:
        message = f"the model cannot be tried ({type(error).__name__}: {error})"
        raise FatalError(message[:300], code="unsupported_model") from error


def _fit(model: Any, bits: KvBits, limits: ModelLimits) -> Engine:
    limits.check_triable()
    exact = read_spec(model, KvBits(NATIVE, NATIVE, NATIVE))
    prompts = _prompts(exact)
    reference = [_upstream_logits(model, prompt) for prompt in prompts]
    tolerance = _tolerance(exact)
    try:
        with attention.observing() as calls:
            ours = decode_alone(Engine(model, exact, limits=limits), prompts)
    except Exception as error:
        message = f"the model does not run on macfabric's caches ({type(error).__name__}: {error})"
        raise FatalError(message, code="unsupported_model") from error
    if not agree(ours, reference, tolerance):
        message = "the model computes different logits on macfabric's caches than on mlx-lm's"
        raise FatalError(message, code="unsupported_model")
    spec = with_rotations(read_spec(model, bits), read_rotations(model))
    engine = _quantized_engine(model, limits, spec, bits, prompts)
    engine.pair_bytes = _pair_bytes(calls)
    _check_storable(engine.spec)
    find_batching(engine, prompts, tolerance)
    return engine


def _pair_bytes(calls: list[AttentionCall]) -> int:
    """Return the bytes of a prompt's scores per query and key token; 0 if none are stored."""
    fused = backend.current().fused_widths
    return max((call.pair_bytes for call in calls if call.width not in fused), default=0)


def _check_storable(spec: ModelCacheSpec) -> None:
    """Raise FatalError for caches whose block files could not be written or verified."""
    try:
        encode_spec(SpecRecord(Fingerprint(bytes(32)), "", spec))
    except CorruptDataError as error:
        raise FatalError(error.message, code="unsupported_model") from error


def _prompts(spec: ModelCacheSpec) -> list[list[int]]:
    lengths = list(_LENGTHS)
    if 0 < spec.window_tokens <= _WINDOW_TOKENS_MAX:
        lengths[0] += spec.window_tokens
    return [prompt_of(length) for length in lengths]


def _tolerance(spec: ModelCacheSpec) -> float:
    names = {slot.dtype for layer in spec.layers for slot in layer.slots}
    names |= {state.dtype for layer in spec.layers for state in layer.states}
    return max((_TOLERANCE.get(name, 0.0) for name in names - {"F32"}), default=_TOLERANCE["F32"])


def _upstream_logits(model: Any, prompt: list[int]) -> mx.array:
    caches = make_prompt_cache(model)
    model(mx.array([prompt[:-STEPS]]), cache=caches)
    rows = [model(mx.array([[token]]), cache=caches)[:, -1] for token in prompt[-STEPS:]]
    out = mx.concatenate(rows).astype(mx.float32)
    mx.eval(out)
    return out


def _quantized_engine(
    model: Any,
    limits: ModelLimits,
    spec: ModelCacheSpec,
    bits: KvBits,
    prompts: list[list[int]],
) -> Engine:
    """Return an engine on quantized caches, packed if attention supports that."""
    packed = Engine(model, spec, packed=True, limits=limits)
    try:
        with attention.comparing() as differences:
            decode_alone(packed, prompts)
        off = max((one.item() for one in differences), default=0.0)
        if off <= _tolerance(spec) and bool(differences) == _is_quantized(spec):
            return packed
        _log.warning("packed attention differs from plain attention: using plain numbers")
    except Exception as error:  # noqa: BLE001 - plain numbers avoid any error
        _log.info("attention does not support packed caches (%s)", type(error).__name__)
    layers = tuple(_latent(layer, bits) for layer in spec.layers)
    return Engine(model, replace(spec, layers=layers), packed=False, limits=limits)


def _is_quantized(spec: ModelCacheSpec) -> bool:
    kinds = (LayerKind.FULL, LayerKind.WINDOW)
    layers = (layer for layer in spec.layers if layer.kind in kinds)
    return any(slot.bits != NATIVE for layer in layers for slot in layer.slots)


def _latent(layer: LayerSpec, bits: KvBits) -> LayerSpec:
    """Return a layer as a latent: one head, two widths, and arithmetic on fetched values."""
    heads = {slot.heads for slot in layer.slots}
    widths = {slot.width for slot in layer.slots}
    if layer.kind is not LayerKind.FULL or heads != {1} or len(widths) != len(layer.slots):
        return layer
    group = layer.slots[0].group_size if bits.latent != NATIVE else 0
    slots = tuple(replace(slot, bits=bits.latent, group_size=group) for slot in layer.slots)
    return replace(layer, kind=LayerKind.LATENT, slots=slots)
