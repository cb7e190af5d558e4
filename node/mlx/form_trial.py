"""Choice of the forms in which attention computes on packed vectors, by a trial at start.

Query heads of one key head are rows of one product. On a GPU, MLX divides a product of few rows
among all cores, and walks all tokens of one of more rows with a few of them, so beyond some number
of rows and tokens each row is faster by itself. On the CPU, the values show whether its products of
plain arrays are fast: by a BLAS library they are, several times, and then repay unpacking.
Source: MLX 0.32.4, `mlx/backend/metal/quantized.cpp`: split-K for fewer than four rows.
"""

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from fabric.kvcache.cache_spec import NATIVE, LayerKind, ModelCacheSpec, SlotSpec
from fabric.ports import Clock
from node.mlx.backend import current
from node.mlx.packed_product import (
    PACKED,
    SLOW_KEY_ROWS_MIN,
    UNPACKED_BITS,
    Forms,
    ValuesForm,
    softmax,
    values_product,
)
from node.mlx.token_store import DTYPES, Packed, TokenStore

TRIAL_TOKENS: Final = 4_096
TRIAL_RUNS: Final = 3
_CPU_ROWS_MIN: Final = 4  # rows of a trial on the CPU: with fewer, the forms are too close


def choose_forms(spec: ModelCacheSpec, query_heads: int, clock: Clock) -> Forms:
    """Return the fastest forms on this machine; packed ones where there is no choice."""
    slot = _values_slot(spec)
    if slot is None:
        return PACKED
    rows = query_heads // slot.heads
    if current().is_gpu:
        forms = ValuesForm.FOLDED, ValuesForm.APART
        return Forms(_fastest(forms, slot, rows, clock)) if rows > 1 else PACKED
    if slot.bits != UNPACKED_BITS or DTYPES[slot.dtype] != mx.float32:
        return PACKED
    forms = ValuesForm.FOLDED, ValuesForm.UNPACKED
    values = _fastest(forms, slot, max(rows, _CPU_ROWS_MIN), clock)
    key_rows_min = 1 if values is ValuesForm.UNPACKED else SLOW_KEY_ROWS_MIN
    return Forms(values, key_rows_min, softmax_by_powers=_are_powers_fast(clock))


def _fastest(forms: tuple[ValuesForm, ...], slot: SlotSpec, rows: int, clock: Clock) -> ValuesForm:
    """Return the form that multiplies weights and random values in the least time."""
    store = TokenStore(slot, slot.heads, TRIAL_TOKENS)
    store.write(store.encode(store.random(TRIAL_TOKENS, mx.random.key(0))), 0)
    values = store.fetch(slice(0, slot.heads), 0, TRIAL_TOKENS)
    assert isinstance(values, Packed), "the slot is quantized"
    shape = (1, slot.heads, rows, TRIAL_TOKENS)
    weights = mx.softmax(mx.random.normal(shape, values.scales.dtype), axis=-1)
    mx.eval(store.arrays, weights)

    return min(
        forms, key=lambda form: _least_s(lambda: values_product(weights, values, form), clock)
    )


def _are_powers_fast(clock: Clock) -> bool:
    """Return whether a softmax by powers takes less time than MLX's own."""
    scores = mx.random.normal((_CPU_ROWS_MIN, TRIAL_TOKENS), key=mx.random.key(0))
    mx.eval(scores)
    by_powers = Forms(softmax_by_powers=True)
    powers_s = _least_s(lambda: softmax(scores, by_powers), clock)
    return powers_s < _least_s(lambda: softmax(scores, PACKED), clock)


def _values_slot(spec: ModelCacheSpec) -> SlotSpec | None:
    """Return the spec of values for packed attention, if a layer has such."""
    for layer in spec.layers:
        if layer.kind is LayerKind.FULL and layer.slots and layer.slots[-1].bits != NATIVE:
            return layer.slots[-1]
    return None


def _least_s(work: Callable[[], mx.array], clock: Clock) -> float:
    """Return the least time of a few runs."""
    times_s: list[float] = []
    for _ in range(TRIAL_RUNS):
        began_s = clock.monotonic_s()
        mx.eval(work())
        times_s.append(clock.monotonic_s() - began_s)
    return min(times_s)
