"""Attention over quantized keys and values.

All query heads that share a key head are rows of one product, so nothing is broadcast. Sinks are
logits without values: they take a share of the softmax, and the output is scaled by the rest.
Source: `exp(s_i) / (sum_j exp(s_j) + exp(sink)) = softmax(s)_i * sigmoid(lse(s) - sink)`.

After edits, each run of moved keys is rotated by its own distance. One product per run would
launch a kernel per run, layer and step. Instead keys are cut into tiles, and one gathered product
multiplies each tile by the queries of every run that overlaps it:

    tiles      |   0   |   1   |   2   |   3   |
    runs       |  a      |b|      c            |
    products     0a  1a 1b 1c  2c  3c
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from fabric.kvcache.arrangement import Shift, shift_runs
from node.limits import TILE_PLANS_MAX
from node.mlx.packed_product import Forms, chosen_forms, keys_product, softmax, values_product
from node.mlx.token_store import Packed

TILE_TOKENS = 8  # Metal's kernel computes eight scores at a time; longer tiles waste products
TILED_RUNS_MIN = 24  # as many products cost as much as tiles do, on CPU


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Products of tiles and rotated queries, and the position of each token's score among them."""

    tokens_count: int  # tokens in whole tiles; the rest is multiplied separately
    deltas: tuple[int, ...]
    query_of: mx.array  # query of each product
    tile_of: mx.array
    place_of: mx.array  # position of each token's score in the products


def tile_plan(shifts: tuple[Shift, ...]) -> TilePlan:
    """Plan the products for all whole tiles up to the last moved row."""
    # By identity: all layers of a sequence share the tuple, and comparing it is slower.
    cached = _plans.get(id(shifts))
    if cached is None or cached[0] is not shifts:
        cached = _plans[id(shifts)] = shifts, _plan_tiles(shifts)
        if len(_plans) > TILE_PLANS_MAX:
            _plans.popitem(last=False)
    return cached[1]


_plans: OrderedDict[int, tuple[tuple[Shift, ...], TilePlan]] = OrderedDict()


def _plan_tiles(shifts: tuple[Shift, ...]) -> TilePlan:
    count = shifts[-1].end // TILE_TOKENS * TILE_TOKENS
    deltas = tuple(dict.fromkeys((0, *(shift.delta for shift in shifts))))
    number_of = {delta: number for number, delta in enumerate(deltas)}
    queries: list[int] = []
    tiles: list[int] = []
    places = np.zeros(count, np.uint32)
    for run in shift_runs(shifts, count):
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


def packed_attention(
    queries: mx.array,
    keys: Packed,
    values: Packed,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend `[batch, heads, n, key width]`; return `[batch, heads, n, value width]`."""
    out, scores = _attend(_fold_queries(queries, keys, scale), keys, values, mask, queries.shape[2])
    if sinks is not None:
        out = less_sinks(out, mx.logsumexp(scores, axis=-1), sinks)
    return _unfold_output(out, queries, values.width)


def packed_attention_of_rows(
    queries: mx.array,
    keys: Sequence[Packed],
    values: Sequence[Packed],
    scale: float,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend `[batch, heads, 1, key width]`, each row to its own vectors."""
    folded = mx.split(_fold_queries(queries, keys[0], scale), len(keys))
    attended = [_attend(*row, None, 1) for row in zip(folded, keys, values, strict=True)]
    out = mx.concatenate([own for own, _ in attended])
    if sinks is not None:
        sums = [mx.logsumexp(scores, axis=-1) for _, scores in attended]
        out = less_sinks(out, mx.concatenate(sums), sinks)
    return _unfold_output(out, queries, values[0].width)


def _fold_queries(queries: mx.array, keys: Packed, scale: float) -> mx.array:
    """Return scaled queries `[batch, kv_heads, repeats * n, stored width]`."""
    batch, heads, count, width = queries.shape
    kv_heads = keys.codes.shape[1]
    folded = (queries * scale).reshape(batch, kv_heads, heads // kv_heads * count, width)
    padding = keys.scales.shape[-1] * keys.group_size - width
    return mx.pad(folded, [(0, 0), (0, 0), (0, 0), (0, padding)]) if padding else folded


def _unfold_output(out: mx.array, queries: mx.array, width: int) -> mx.array:
    return out.reshape(*queries.shape[:3], out.shape[-1])[..., :width]


def _attend(
    folded: mx.array, keys: Packed, values: Packed, mask: mx.array | str | None, count: int
) -> tuple[mx.array, mx.array]:
    """Attend folded queries of `count` tokens; return the output and its scores."""
    forms = chosen_forms()
    scores = _scores(folded, keys, forms)
    if mask is not None:
        scores = apply_mask(scores, mask, count)
    weights = softmax(scores, forms)
    return values_product(weights, values, forms.values), scores


def less_sinks(out: mx.array, score_sums: mx.array, sinks: mx.array) -> mx.array:
    """Scale the output by the share that sinks leave; log sums are `[batch, kv_heads, rows]`."""
    kv_heads, rows = score_sums.shape[1:]
    repeats = sinks.size // kv_heads
    sink = mx.repeat(sinks.reshape(kv_heads, repeats), rows // repeats, axis=1)
    return out * mx.sigmoid(score_sums - sink.astype(score_sums.dtype))[..., None]


def _scores(queries: mx.array, keys: Packed, forms: Forms) -> mx.array:
    if keys.moved_rows is None:
        return keys_product(queries, keys, forms)
    parts, moved_rows, done, tokens_count = [], keys.moved_rows, 0, keys.codes.shape[2]
    if len(moved_rows.shifts) >= TILED_RUNS_MIN:
        plan = tile_plan(moved_rows.shifts)
        rotated, done = moved_rows.rotate_back(queries, plan.deltas), plan.tokens_count
        parts.append(tiled_scores(rotated, keys[:3], plan, keys.quantization))
        moved_rows = moved_rows.from_row(done, tokens_count)
    for run, rotated in moved_rows.rotate_queries(queries, tokens_count - done):
        start, end = run.start + done, run.end + done
        parts.append(keys_product(rotated, keys.between(start, end), forms))
    return mx.concatenate(parts, axis=-1)


def apply_mask(scores: mx.array, mask: mx.array | str, count: int) -> mx.array:
    """Apply a mask to the scores `[batch, kv_heads, repeats * n, tokens]` of `count` queries."""
    batch, kv_heads, rows, tokens_count = scores.shape
    grouped = scores.reshape(batch, kv_heads, rows // count, count, tokens_count)
    if isinstance(mask, str):
        at = mx.arange(tokens_count - count, tokens_count)[:, None]
        mask = at >= mx.arange(tokens_count)[None]
    elif mask.ndim > 3:  # `[batch or 1, heads or 1, n, tokens]`
        mask_heads = mask.shape[1]
        if mask_heads == 1:
            mask = mask[:, :, None]
        else:
            mask = mask.reshape(mask.shape[0], *grouped.shape[1:3], *mask.shape[2:])
    if mask.dtype == mx.bool_:
        masked = mx.where(mask, grouped, mx.finfo(scores.dtype).min)
    else:
        masked = grouped + mask
    return masked.reshape(scores.shape)
