"""Plain MLX versions of families' Metal-only kernels, for machines without Metal.

They round where the kernels round; in float32, nowhere.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models import muse_spark

Array = mx.array


def _normed(x: Array, eps: float) -> Array:
    wide = x.astype(mx.float32)
    return wide * mx.rsqrt(mx.mean(wide * wide, axis=-1, keepdims=True) + eps)


def qk_norm(
    qkvg: Array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[Array]:
    """Split queries and keys off a joint projection, and normalize each head."""
    ends = [n_heads * head_dim, (n_heads + n_kv_heads) * head_dim]
    queries, keys, _ = mx.split(qkvg, ends, axis=-1)
    normed_parts = []
    for part, heads, scale in ((queries, n_heads, query_scale), (keys, n_kv_heads, 1.0)):
        by_head = part.reshape(*part.shape[:-1], heads, head_dim)
        rounded = _normed(by_head, eps).astype(qkvg.dtype)
        normed_parts.append((rounded.astype(mx.float32) * scale).astype(qkvg.dtype))
    return normed_parts


def qk_norm_rope(
    qkvg: Array, *, rope_base: float, offset: int | Array, head_dim: int, **more: Any
) -> list[Array]:
    """Normalize, then rotate neighbouring pairs by position."""

    def turned(part: Array) -> Array:
        rows = part.swapaxes(1, 2)
        rope = mx.fast.rope(
            rows, head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset
        )
        return rope.swapaxes(1, 2)

    return [turned(part) for part in qk_norm(qkvg, head_dim=head_dim, **more)]


def rms_norm_sigmoid_gate(x: Array, gate: Array, *, eps: float) -> Array:
    """Normalize each head of `[batch, heads, tokens, dims]`, and gate it."""
    batch, heads, tokens, dims = x.shape
    rows = _normed(x, eps).swapaxes(1, 2)
    opened = mx.sigmoid(gate.astype(mx.float32)).reshape(batch, tokens, heads, dims)
    return (rows * opened).astype(x.dtype).reshape(batch, tokens, heads * dims)


def expert_routing(
    logits: Array,
    expert_bias: Array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[Array]:
    """Choose experts by biased scores; weigh them by the plain ones."""
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale
    return [chosen.astype(mx.uint32), weights]


def post_expert_norm_combine(
    experts: Array, weights: Array, *, norm_weight: Array, eps: float
) -> Array:
    """Normalize the output of each expert, and sum the outputs in order."""
    normed = _normed(experts.astype(mx.float32) * norm_weight.astype(mx.float32), eps)
    parts = normed * weights.astype(experts.dtype).astype(mx.float32)[..., None]
    total = mx.zeros_like(parts[..., 0, :]).astype(experts.dtype)
    for index in range(parts.shape[-2]):
        total = (total.astype(mx.float32) + parts[..., index, :]).astype(experts.dtype)
    return total


def pre_norm(stream: Array, norm: Any, *, dtype: mx.Dtype) -> Array:
    """Normalize the stream for the next block."""
    return (_normed(stream, norm.eps) * norm.weight).astype(dtype)


def norm_add_norm(
    branch: Array,
    stream: Array,
    *,
    alpha: Array,
    beta: Array,
    post_weight: Array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[Array, Array | None]:
    """Add a normalized branch to the stream, and normalize the sum for the next block."""
    scaled = branch if post_weight is None else branch * post_weight.astype(branch.dtype)
    added = beta * _normed(scaled, post_eps).astype(branch.dtype).astype(mx.float32)
    whole = alpha * stream.astype(mx.float32) + added
    if next_norm is None:
        return whole, None
    return whole, pre_norm(whole, next_norm, dtype=branch.dtype)


def install() -> None:
    """Replace the kernels where there is no Metal."""
    if mx.metal.is_available():
        return
    for plain in (
        expert_routing,
        norm_add_norm,
        post_expert_norm_combine,
        pre_norm,
        qk_norm,
        qk_norm_rope,
        rms_norm_sigmoid_gate,
    ):
        assert hasattr(muse_spark, plain.__name__), "mlx-lm has another kernel under this name"
        setattr(muse_spark, plain.__name__, plain)
