"""Attention over quantized keys and values, without unpacking them.

Query heads of one key head become rows of one product, so nothing is broadcast. Sinks are a
logit without a value: they only take a share of the softmax, which the output is scaled by.
Source: `exp(s_i) / (sum_j exp(s_j) + exp(sink)) = softmax(s)_i * sigmoid(lse(s) - sink)`.
"""

import mlx.core as mx

from node.mlx.tiled_scores import TILED_RUNS_MIN, tile_plan, tiled_scores
from node.mlx.token_store import Packed


def packed_attention(
    queries: mx.array,
    keys: Packed,
    values: Packed,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend `[batch, heads, n, key width]`; return `[batch, heads, n, value width]`."""
    batch, heads, count, width = queries.shape
    kv_heads = keys.codes.shape[1]
    repeats = heads // kv_heads
    queries = (queries * scale).reshape(batch, kv_heads, repeats * count, width)
    padding = keys.scales.shape[-1] * keys.group_size - width
    if padding:
        queries = mx.pad(queries, [(0, 0), (0, 0), (0, 0), (0, padding)])
    scores = _scores(queries, keys)
    tokens_count = scores.shape[-1]
    if mask is not None:
        grouped = scores.reshape(batch, kv_heads, repeats, count, tokens_count)
        grouped = _masked(grouped, mask)
        scores = grouped.reshape(batch, kv_heads, repeats * count, tokens_count)
    weights = mx.softmax(scores, axis=-1, precise=True)
    out = mx.quantized_matmul(
        weights, *values[:3], transpose=False, group_size=values.group_size, bits=values.bits
    )
    if sinks is not None:
        sink = mx.repeat(sinks.reshape(kv_heads, repeats), count, axis=1)
        share = mx.sigmoid(mx.logsumexp(scores, axis=-1) - sink.astype(scores.dtype))
        out = out * share[..., None]
    return out.reshape(batch, heads, count, out.shape[-1])[..., : values.width]


def _scores(queries: mx.array, keys: Packed) -> mx.array:
    bits = {"group_size": keys.group_size, "bits": keys.bits}
    if keys.turning is None:
        return mx.quantized_matmul(queries, *keys[:3], transpose=True, **bits)
    parts, turning, done, tokens_count = [], keys.turning, 0, keys.codes.shape[2]
    if len(turning.shifts) >= TILED_RUNS_MIN:
        plan = tile_plan(turning.shifts)
        turned, done = turning.back(queries, plan.deltas), plan.tokens_count
        parts.append(tiled_scores(turned, keys[:3], plan, bits))
        turning = turning.behind(done, tokens_count)
    for run, turned in turning.of_queries(queries, tokens_count - done):
        start, end = run.start + done, run.end + done
        codes, scales, biases = (array[:, :, start:end] for array in keys[:3])
        parts.append(mx.quantized_matmul(turned, codes, scales, biases, transpose=True, **bits))
    return mx.concatenate(parts, axis=-1)


def _masked(scores: mx.array, mask: mx.array | str) -> mx.array:
    """Apply a mask to `[batch, kv_heads, repeats, n, tokens]`."""
    if isinstance(mask, str):
        count, tokens_count = scores.shape[-2:]
        at = mx.arange(tokens_count - count, tokens_count)[:, None]
        mask = at >= mx.arange(tokens_count)[None]
    elif mask.ndim > 3:  # `[batch or 1, heads or 1, n, tokens]`
        mask_heads = mask.shape[1]
        if mask_heads == 1:
            mask = mask[:, :, None]
        else:
            mask = mask.reshape(mask.shape[0], scores.shape[1], scores.shape[2], *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    return scores + mask
