"""Caches with moved rows, and the same caches rotated by hand."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from fabric.kvcache.arrangement import Range, Shift, cut_shifts
from node.mlx.engine import Engine
from node.mlx.resident_cache import ResidentCache
from node.mlx.resident_layer import ResidentLayer
from node.mlx.token_store import dense
from tests.support.rotations import turned

ROOM = 64
# Difference of two computations of the same logits; Metal's sine is off by 2^-13 at any angle.
ROUNDING = 1e-3 if mx.metal.is_available() else 1e-5


def filled(
    engine: Engine,
    tokens_count: int,
    shifts: Sequence[Shift] = (),
    ahead: Sequence[Range] = (),
    *,
    seed: int = 0,
) -> ResidentCache:
    """Return a cache of random rows, some of them moved."""
    end = ahead[-1][1] if ahead else tokens_count
    cache = engine.new_cache(end + ROOM)
    cache.fill(end, mx.random.key(seed))
    cache.hold(tokens_count, ahead, shifts)
    return cache


def relative_error(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def by_hand(cache: ResidentCache, shifts: Sequence[Shift]) -> ResidentCache:
    """Make a cache without shifts fetch dense rows, rotated in float64."""
    assert not cache.shifts, "rows would be rotated twice"
    for leaf in cache.leaves:
        if isinstance(leaf, ResidentLayer):
            leaf._packed = False
            leaf.fetch = partial(_fetch, leaf, shifts)  # type: ignore[method-assign]
    return cache


def _fetch(leaf: ResidentLayer, shifts: Sequence[Shift], first: int, end: int) -> list[Any]:
    deltas = np.zeros(end - first)
    for shift in cut_shifts(tuple(shifts), first, end):
        deltas[shift.start : shift.end] = shift.delta
    rotations = {rotation.slot: rotation for rotation in leaf.spec.rotations}
    found = []
    for slot, (store, heads) in zip(leaf.spec.slots, leaf._parts, strict=True):
        rows = dense(store.fetch(heads, first - leaf.base, end - leaf.base))
        if slot.name in rotations:
            far = turned(rows, rotations[slot.name], deltas)
            rows = mx.where(mx.array(deltas)[:, None] != 0, mx.array(far).astype(rows.dtype), rows)
        found.append(rows)
    return found
