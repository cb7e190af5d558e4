"""The caches of single layers that one sequence's cache is made of."""

from typing import Any

import mlx.core as mx

from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from node.mlx.recurrent_layer import RecurrentLayer, Snapshot
from node.mlx.resident_layer import ResidentLayer
from node.mlx.token_store import DTYPES
from node.mlx.window_layer import ChunkLayer, WindowLayer

LayerCache = ResidentLayer | RecurrentLayer


def make_layer_cache(layer: LayerSpec, capacity_tokens: int, *, packed: bool) -> LayerCache:
    """Return an empty cache of one layer."""
    if layer.kind is LayerKind.RECURRENT:
        return RecurrentLayer(zero_states(layer))
    if layer.kind is LayerKind.WINDOW:
        kind = ChunkLayer if layer.is_chunked else WindowLayer
        return kind(layer, capacity_tokens, packed=packed)
    is_packed = packed and layer.kind is LayerKind.FULL
    return ResidentLayer(layer, capacity_tokens, packed=is_packed)


def zero_states(layer: LayerSpec) -> Snapshot:
    """Return a recurrent layer's states of an empty context."""
    return [mx.zeros(state.shape, DTYPES[state.dtype]) for state in layer.states]


def arrange_layers(spec: ModelCacheSpec, leaves: list[Any]) -> list[Any]:
    """Arrange one object per layer as the model does: some caches are lists of several."""
    at, out = 0, []
    for count in spec.nesting:
        out.append(leaves[at] if count == 0 else leaves[at : at + count])
        at += max(count, 1)
    assert at == len(leaves), "the nesting covers every layer"
    return out
