"""Choice of the form in which attention multiplies packed values, by a trial on the GPU at start.

Query heads of one key head are rows of one product. MLX divides a product of few rows among all of
a GPU's cores, and walks all tokens of one of more rows with a few of them, so beyond some number of
rows and tokens each row is faster by itself.
Source: MLX 0.32.4, `mlx/backend/metal/quantized.cpp`: split-K for fewer than four rows.
"""

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from fabric.kvcache.cache_spec import NATIVE, LayerKind, ModelCacheSpec, SlotSpec
from fabric.ports import Clock
from node.mlx.packed_attention import ValuesForm, values_product
from node.mlx.token_store import Packed, TokenStore

TRIAL_TOKENS: Final = 4_096
TRIAL_RUNS: Final = 3


def choose_values_form(spec: ModelCacheSpec, query_heads: int, clock: Clock) -> ValuesForm:
    """Return the faster form on this machine; `folded` where there is no choice."""
    slot = _values_slot(spec)
    if slot is None or query_heads <= slot.heads:
        return ValuesForm.FOLDED
    store = TokenStore(slot, slot.heads, TRIAL_TOKENS)
    store.write(store.encode(store.random(TRIAL_TOKENS, mx.random.key(0))), 0)
    values = store.fetch(slice(0, slot.heads), 0, TRIAL_TOKENS)
    assert isinstance(values, Packed), "the slot is quantized"
    shape = (1, slot.heads, query_heads // slot.heads, TRIAL_TOKENS)
    weights = mx.softmax(mx.random.normal(shape, values.scales.dtype), axis=-1)
    mx.eval(store.arrays, weights)

    def run_s(form: ValuesForm) -> float:
        return min(
            _seconds(lambda: values_product(weights, values, form), clock)
            for _ in range(TRIAL_RUNS)
        )

    return min(ValuesForm, key=run_s)


def _values_slot(spec: ModelCacheSpec) -> SlotSpec | None:
    """Return the spec of values for packed attention, if a layer has such."""
    for layer in spec.layers:
        if layer.kind is LayerKind.FULL and layer.slots and layer.slots[-1].bits != NATIVE:
            return layer.slots[-1]
    return None


def _seconds(work: Callable[[], mx.array], clock: Clock) -> float:
    began_s = clock.monotonic_s()
    mx.eval(work())
    return clock.monotonic_s() - began_s
