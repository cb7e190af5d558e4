"""Scores of one query against packed keys of many runs, each rotated by its own distance.

One product per run is a launch per run, layer and step. Here keys are cut into tiles, and one
gathered product multiplies every tile by the queries of each run that has a part in it:

    tiles      |   0   |   1   |   2   |   3   |
    runs       |  a      |b|      c            |
    products     0a  1a 1b 1c  2c  3c
"""

from collections import OrderedDict
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from fabric.kvcache.shift import Shift, runs
from node.limits import TILE_PLANS_MAX

TILE_TOKENS = 8  # Metal's kernel computes eight scores at a time; longer tiles waste products
TILED_RUNS_MIN = 24  # as many products cost as much as tiles do, on CPU


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Products of tiles and rotated queries, and the position of each token's score among them."""

    tokens_count: int  # of whole tiles; the rest is multiplied separately
    deltas: tuple[int, ...]
    query_of: mx.array  # of each product
    tile_of: mx.array
    place_of: mx.array  # of each token, in all products


def tile_plan(shifts: tuple[Shift, ...]) -> TilePlan:
    """Plan the products for all whole tiles up to the last moved row."""
    # By identity: all layers of a sequence share the tuple, and comparing it is slower.
    known = _plans.get(id(shifts))
    if known is None or known[0] is not shifts:
        known = _plans[id(shifts)] = shifts, _planned(shifts)
        if len(_plans) > TILE_PLANS_MAX:
            _plans.popitem(last=False)
    return known[1]


_plans: OrderedDict[int, tuple[tuple[Shift, ...], TilePlan]] = OrderedDict()


def _planned(shifts: tuple[Shift, ...]) -> TilePlan:
    count = shifts[-1].end // TILE_TOKENS * TILE_TOKENS
    deltas = tuple(dict.fromkeys((0, *(shift.delta for shift in shifts))))
    number_of = {delta: number for number, delta in enumerate(deltas)}
    queries: list[int] = []
    tiles: list[int] = []
    places = np.zeros(count, np.uint32)
    for run in runs(shifts, count):
        start, end = run.start, min(run.end, count)
        for tile in range(start // TILE_TOKENS, -(-end // TILE_TOKENS)):
            first, last = (max(start, tile * TILE_TOKENS), min(end, (tile + 1) * TILE_TOKENS))
            places[first:last] = np.arange(first, last) + (len(tiles) - tile) * TILE_TOKENS
            queries.append(number_of[run.delta])
            tiles.append(tile)
    query_of, tile_of = mx.array(queries, mx.uint32), mx.array(tiles, mx.uint32)
    return TilePlan(count, deltas, query_of, tile_of, mx.array(places))


def tiled_scores(
    queries: mx.array, packed: tuple[mx.array, ...], plan: TilePlan, bits: dict[str, int]
) -> mx.array:
    """Multiply `[batch, heads, rows, distances, width]` with packed `[batch, heads, tokens, ...]`.

    Return `[batch, heads, rows, plan.tokens_count]`.
    """
    batch, heads, rows, distances, _ = queries.shape
    lead, tiles_count = batch * heads, plan.tokens_count // TILE_TOKENS
    tiles = (
        array[:, :, : plan.tokens_count].reshape(lead, tiles_count, TILE_TOKENS, -1)
        for array in packed
    )
    number = mx.arange(lead, dtype=mx.uint32)[:, None]
    products = mx.gather_qmm(
        mx.contiguous(queries.reshape(lead, rows, distances, -1).swapaxes(1, 2)),
        *tiles,
        lhs_indices=number * distances + plan.query_of,
        rhs_indices=number * tiles_count + plan.tile_of,
        transpose=True,
        **bits,
    )
    scores = products.swapaxes(1, 2).reshape(batch, heads, rows, -1)
    return mx.take(scores, plan.place_of, axis=-1)
