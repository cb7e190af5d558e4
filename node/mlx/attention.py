"""The one place where mlx-lm's models call our attention.

Every architecture imports `scaled_dot_product_attention` by name, so it is rebound in their
modules. What was fetched says how to attend: packed vectors, one entry per sequence, or
arrays as ever, for which mlx-lm's own function is called.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from node.mlx.packed_attention import packed_attention
from node.mlx.token_store import Packed

_stock_attention = base.scaled_dot_product_attention
_NAME = "scaled_dot_product_attention"


class Rows(list[Any]):
    """What was fetched for several sequences, one entry each: nothing is padded."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call as an observer sees it."""

    cache: Any
    has_sinks: bool


_observers = threading.local()  # of the engine thread: tests run several in one process


@contextmanager
def observing() -> Iterator[list[AttentionCall]]:
    """Collect the attention calls made meanwhile; only on the engine thread."""
    calls: list[AttentionCall] = []
    before = getattr(_observers, "calls", None)
    _observers.calls = calls
    try:
        yield calls
    finally:
        _observers.calls = before


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx-lm does, and to packed and ragged caches as well."""
    calls = getattr(_observers, "calls", None)
    if calls is not None:
        calls.append(AttentionCall(cache, sinks is not None))
    if isinstance(keys, Rows):
        rows = [
            _attend_one(queries[i : i + 1], keys[i], values[i], scale, None, sinks)
            for i in range(len(keys))
        ]
        return mx.concatenate(rows)
    if isinstance(keys, Packed):
        return packed_attention(queries, keys, values, scale, mask, sinks)
    return _stock_attention(queries, keys, values, cache, scale, mask, sinks)


def _attend_one(
    queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    if isinstance(keys, Packed):
        return packed_attention(queries, keys, values, scale, mask, sinks)
    return _stock_attention(queries, keys, values, None, scale, mask, sinks)


def install() -> None:
    """Make every loaded model module call `attend`; repeatable."""
    for name, module in list(sys.modules.items()):
        is_model = name.startswith("mlx_lm.models.") and module is not base
        if is_model and getattr(module, _NAME, None) is _stock_attention:
            setattr(module, _NAME, attend)
