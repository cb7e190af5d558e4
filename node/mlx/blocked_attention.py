"""Attention of many queries on the CPU, to one block of tokens after another.

MLX's exponentials take most of the time of such attention on x86; powers of the C library take a
third of theirs. Each block is dequantized when it is multiplied, in the processor's cache.
Source of the running softmax: Milakov and Gimelshein, arXiv 1805.02867.
"""

import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import mlx.core as mx

from node.mlx.packed_attention import apply_mask, less_sinks
from node.mlx.token_store import Packed

BLOCK_SCORES: Final = 1 << 20  # computed at once: 4 MiB
BLOCK_TOKENS_MIN: Final = 256  # shorter blocks cost more operations than they save


class _Sums(NamedTuple):
    """Unfinished softmax `[batch, kv_heads, rows, 1]`, with its output `[..., value width]`."""

    largest: mx.array  # score
    weights: mx.array  # sum of `e ** (score - largest)`
    out: mx.array  # sum of the values with these weights

    def join(self, block: "_Sums") -> "_Sums":
        largest = mx.maximum(self.largest, block.largest)
        own = mx.power(math.e, self.largest - largest)
        added = mx.power(math.e, block.largest - largest)
        weights = self.weights * own + block.weights * added
        return _Sums(largest, weights, self.out * own + block.out * added)


def blocked_attention(
    queries: mx.array,
    keys: mx.array | Packed,
    values: mx.array | Packed,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend `[batch, heads, n, key width]`; return `[batch, heads, n, value width]`."""
    batch, heads, count, width = queries.shape
    kv_heads, tokens_count = (keys.codes if isinstance(keys, Packed) else keys).shape[1:3]
    folded = (queries * scale).reshape(batch, kv_heads, -1, width)
    keys, values = _rotated(keys), _rotated(values)
    sums: _Sums | None = None
    for start, end in _blocks(heads * count, count, tokens_count):
        scores = folded @ _numbers(keys, start, end).swapaxes(-1, -2)
        part = _mask_part(mask, start, end, is_last=end == tokens_count)
        if part is not None:
            scores = apply_mask(scores, part, count)
        block = _sums_of(scores, _numbers(values, start, end))
        sums = block if sums is None else sums.join(block)
    assert sums is not None, "queries attend to themselves"
    out = sums.out / sums.weights
    if sinks is not None:
        score_sums = sums.largest + mx.log(sums.weights)
        out = less_sinks(out, score_sums.squeeze(-1), sinks)
    return out.reshape(batch, heads, count, -1)


def _sums_of(scores: mx.array, values: mx.array) -> _Sums:
    # A difference of infinities would be no number.
    largest = mx.maximum(scores.max(axis=-1, keepdims=True), mx.finfo(scores.dtype).min)
    weights = mx.power(math.e, scores - largest)
    return _Sums(largest, weights.sum(axis=-1, keepdims=True), weights @ values)


def _blocks(rows: int, count: int, tokens_count: int) -> Iterator[tuple[int, int]]:
    """Yield equal parts of the tokens before the queries' own, then their own."""
    before = tokens_count - count
    if before > 0:
        length = max(BLOCK_TOKENS_MIN, BLOCK_SCORES // rows)
        length = -(-before // -(-before // length))
        for start in range(0, before, length):
            yield start, min(before, start + length)
    yield before, tokens_count


def _mask_part(
    mask: mx.array | str | None, start: int, end: int, *, is_last: bool
) -> mx.array | str | None:
    """Return a block's part of the mask; None: queries attend to all of its tokens."""
    if isinstance(mask, str):  # causal: it concerns only the queries' own tokens
        return mask if is_last else None
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., start:end]


def _rotated(vectors: mx.array | Packed) -> mx.array | Packed:
    """Rotate moved rows, which a block does not know."""
    is_moved = isinstance(vectors, Packed) and vectors.moved_rows is not None
    return vectors.dense() if is_moved else vectors


def _numbers(vectors: mx.array | Packed, start: int, end: int) -> mx.array:
    if isinstance(vectors, Packed):
        return vectors.between(start, end).dense()
    return vectors[:, :, start:end]
