"""The one place where mlx-lm's models call our attention.

Every architecture imports `scaled_dot_product_attention` by name, so it is rebound in their
modules. The type of the fetched values selects the form: packed vectors, one entry per sequence,
or plain arrays, for which mlx-lm's own function is called. On the CPU, many queries attend to both
packed vectors and plain arrays in blocks.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from node.mlx.backend import stored_by_columns
from node.mlx.blocked_attention import blocked_attention
from node.mlx.packed_attention import packed_attention, packed_attention_of_rows
from node.mlx.packed_product import chosen_forms
from node.mlx.token_store import Packed, last_tokens

_upstream_attention = base.scaled_dot_product_attention
_NAME = "scaled_dot_product_attention"
_LAID_OUT_QUERIES_MIN = 8  # fewer do not repay a copy of the keys


class Rows(list[Any]):
    """Fetched values of several sequences, one entry each, without padding."""


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Mask of ragged batches: each row attends to its last `window` tokens."""

    count: int


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One observed call."""

    cache: Any
    has_sinks: bool
    heads: int  # query heads
    width: int
    item_bytes: int

    @property
    def pair_bytes(self) -> int:
        """Bytes of the scores of one query token and one key token."""
        return self.heads * self.item_bytes


_observers = threading.local()  # per engine thread: tests run several in one process


@contextmanager
def observing() -> Iterator[list[AttentionCall]]:
    """Collect the attention calls of this context; only on the engine thread."""
    calls: list[AttentionCall] = []
    before = getattr(_observers, "calls", None)
    _observers.calls = calls
    try:
        yield calls
    finally:
        _observers.calls = before


@contextmanager
def comparing() -> Iterator[list[mx.array]]:
    """Collect, by call, the differences between packed and plain attention on the same numbers.

    Relative to the largest output. Each call is compared by itself, because a deep model of 16 bits
    amplifies the smallest difference. Only on the engine thread.
    """
    differences: list[mx.array] = []
    before = getattr(_observers, "differences", None)
    _observers.differences = differences
    try:
        yield differences
    finally:
        _observers.differences = before


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx-lm does, also to packed and ragged caches."""
    calls = getattr(_observers, "calls", None)
    if calls is not None:
        heads, width, item_bytes = queries.shape[1], queries.shape[3], queries.itemsize
        calls.append(AttentionCall(cache, sinks is not None, heads, width, item_bytes))
    if isinstance(keys, Rows):
        return _attend_rows(queries, keys, values, scale, mask, sinks)
    if isinstance(keys, Packed):
        attention = blocked_attention if _computes_blocks(queries, keys.codes) else packed_attention
        out = attention(queries, keys, values, scale, mask, sinks)
        differences = getattr(_observers, "differences", None)
        if differences is not None:
            unpacked = keys.dense(), values.dense()
            plain = _upstream_attention(queries, *unpacked, None, scale, mask, sinks)
            differences.append(_difference(out, plain))
        return out
    if isinstance(keys, mx.array) and _computes_blocks(queries, keys):
        return blocked_attention(queries, keys, values, scale, mask, sinks)
    if queries.shape[2] >= _LAID_OUT_QUERIES_MIN and isinstance(keys, mx.array):
        keys = stored_by_columns(keys)
    return _upstream_attention(queries, keys, values, cache, scale, mask, sinks)


def _computes_blocks(queries: mx.array, stored: mx.array) -> bool:
    is_single = queries.dtype == mx.float32
    return is_single and chosen_forms().computes_blocks(queries.shape[2], stored.shape[2])


def _difference(ours: mx.array, theirs: mx.array) -> mx.array:
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    return mx.abs(ours - theirs).max() / mx.abs(theirs).max()


def _attend_rows(
    queries: mx.array, keys: Rows, values: Rows, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    seen = [_seen(*row, mask) for row in zip(keys, values, strict=True)]
    keys, values = Rows(own for own, _ in seen), Rows(own for _, own in seen)
    if isinstance(keys[0], Packed):
        return packed_attention_of_rows(queries, keys, values, scale, sinks)
    apart = mx.split(queries, len(keys))
    return mx.concatenate(
        [
            _upstream_attention(*row, None, scale, None, sinks)
            for row in zip(apart, keys, values, strict=True)
        ]
    )


def _seen(keys: Any, values: Any, mask: Any) -> tuple[Any, Any]:
    """Cut one row's tokens to those that the mask allows."""
    if mask is None:
        return keys, values
    if not isinstance(mask, LastTokens):
        message = "the model's own mask does not cover rows of unequal length"
        raise TypeError(message)
    return last_tokens(keys, mask.count), last_tokens(values, mask.count)


def install() -> None:
    """Make every loaded model module call `attend`; idempotent."""
    for name, module in list(sys.modules.items()):
        is_model = name.startswith("mlx_lm.models.") and module is not base
        if is_model and getattr(module, _NAME, None) is _upstream_attention:
            setattr(module, _NAME, attend)
