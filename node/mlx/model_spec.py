"""Cache spec of a model, read from the caches it creates.

A few tokens are run through the model and its caches are inspected; the model's name decides
nothing. A cache of unknown kind makes the model opaque: it is served, without reuse.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from fabric.errors import FatalError
from fabric.kvcache.cache_spec import (
    NATIVE,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    SlotSpec,
    TensorSpec,
)
from fabric.kvcache.rotation import CacheRotations, UnknownRotation
from fabric.settings import KvBits
from node.mlx import attention
from node.mlx.token_store import DTYPE_NAMES

_TOKENS = list(range(16))  # more than states of n-grams or convolutions depend on
_GROUP_SIZES = (64, 32)  # the larger at equal padding: fewer scales


def read_spec(model: Any, bits: KvBits) -> ModelCacheSpec:
    """Return the spec of the model's caches at `bits`; raise FatalError for unknown kinds."""
    attention.install()
    caches = make_prompt_cache(model)
    leaves, nesting = flatten(caches)
    unknown = sorted({_type_name(leaf) for leaf in leaves if not _is_known(leaf)})
    if unknown:
        message = f"caches of kind {', '.join(unknown)} cannot be cut or stored"
        raise FatalError(message, code="unsupported_model")
    with attention.observing() as calls:
        model(mx.array([_TOKENS]), cache=caches)
    mx.eval([_arrays(leaf) for leaf in leaves])
    with_sinks = {id(call.cache) for call in calls if call.has_sinks}
    layers = tuple(_layer(leaf, bits, has_sinks=id(leaf) in with_sinks) for leaf in leaves)
    sharing = sum(call.cache is None for call in calls)
    return ModelCacheSpec(layers, nesting, sharing)


def with_rotations(spec: ModelCacheSpec, found: list[CacheRotations]) -> ModelCacheSpec:
    """Add to every layer the dimensions that depend on the position."""
    layers = [
        replace(layer, rotations_unknown=rotations.reason)
        if isinstance(rotations, UnknownRotation)
        else replace(layer, rotations=rotations)
        for layer, rotations in zip(spec.layers, found, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


def flatten(caches: list[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return all plain caches, and the number of them in each of the model's caches."""
    leaves: list[Any] = []
    nesting = []
    for cache in caches:
        if type(cache) is CacheList:
            leaves += cache.caches
            nesting.append(len(cache.caches))
        else:
            leaves.append(cache)
            nesting.append(0)
    return leaves, tuple(nesting)


def _type_name(cache: Any) -> str:
    return type(cache).__name__


def _is_known(cache: Any) -> bool:
    if type(cache) is RotatingKVCache:
        return bool(cache.keep == 0)  # kept first tokens would be a second window
    return type(cache) in (KVCache, ChunkedKVCache, ArraysCache)


def _arrays(leaf: Any) -> list[mx.array]:
    if isinstance(leaf, ArraysCache):
        return [array for array in leaf.cache if array is not None]
    return [] if leaf.keys is None else [leaf.keys, leaf.values]


def _layer(leaf: Any, bits: KvBits, *, has_sinks: bool) -> LayerSpec:
    if isinstance(leaf, ArraysCache):
        return _recurrent_layer(leaf)
    if leaf.keys is None:  # the layer stores nothing
        return LayerSpec(LayerKind.FULL)
    keys, values = leaf.keys_and_values()
    if values.shape[-1] == 0 or not mx.any(values).item():
        # An index stores keys only; its values are a dummy.
        return LayerSpec(LayerKind.INDEXED, (_slot("index", keys, NATIVE),))
    if isinstance(leaf, RotatingKVCache):
        kind, count, window = LayerKind.WINDOW, bits.window, leaf.max_size
    elif isinstance(leaf, ChunkedKVCache):
        kind, count, window = LayerKind.WINDOW, bits.window, leaf.chunk_size
    else:
        kind, count, window = LayerKind.FULL, bits.full, 0
    slots = (_slot("keys", keys, count), _slot("values", values, count))
    is_chunked = isinstance(leaf, ChunkedKVCache)
    return LayerSpec(kind, slots, window_tokens=window, is_chunked=is_chunked, has_sinks=has_sinks)


def _recurrent_layer(leaf: ArraysCache) -> LayerSpec:
    if any(array is None for array in leaf.cache):
        message = "a recurrent layer leaves part of its state empty"
        raise FatalError(message, code="unsupported_model")
    states = tuple(
        TensorSpec(f"state.{index}", _dtype(array), tuple(array.shape))
        for index, array in enumerate(leaf.cache)
    )
    return LayerSpec(LayerKind.RECURRENT, states=states)


def _slot(name: str, vectors: mx.array, bits: int) -> SlotSpec:
    heads, width = vectors.shape[1], vectors.shape[-1]
    group = min(_GROUP_SIZES, key=lambda size: (-(-width // size) * size, -size))
    return SlotSpec(name, heads, width, bits, group if bits else 0, _dtype(vectors))


def _dtype(array: mx.array) -> str:
    name = DTYPE_NAMES.get(array.dtype)
    if name is None:
        message = f"caches of type {array.dtype} cannot be stored"
        raise FatalError(message, code="unsupported_model")
    return name
