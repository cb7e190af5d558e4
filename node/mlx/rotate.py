"""Rotation of stored keys to other positions.

MLX's kernel for Metal adds a row's number and its offset as unsigned numbers: a rotation backwards
gets its distance as a positive offset and a negative scale.
Source: `pos.y + batch_offset` in mlx/backend/metal/kernels/rope.metal, MLX 0.32.
"""

from collections.abc import Sequence
from math import inf

import mlx.core as mx

from fabric.kvcache.rotation import Rotation


def rotate(array: mx.array, rotation: Rotation, delta: int | Sequence[int] | mx.array) -> mx.array:
    """Shift rows `[..., tokens, width]` by `delta` tokens; the other dimensions keep their bits.

    `delta` may be negative, and may be one integer per token, `[tokens]`. Raise ValueError if
    the rows are narrower than the rotation or the deltas are not one per token.
    """
    start, end = rotation.start, rotation.start + rotation.dims
    if end > array.shape[-1]:
        message = f"rows of {array.shape[-1]} have no dimensions {start} to {end}"
        raise ValueError(message)
    turned = _turn(array[..., start:end], rotation, delta)
    return mx.concatenate([array[..., :start], turned, array[..., end:]], axis=-1)


def _turn(span: mx.array, rotation: Rotation, delta: int | Sequence[int] | mx.array) -> mx.array:
    # The kernel counts positions up along the token axis, so each token gets an axis of length 1.
    if isinstance(delta, int):
        rows = span.reshape(1, -1, 1, rotation.dims)
        return _kernel(rows, rotation, abs(delta), is_back=delta < 0).reshape(span.shape)
    offsets = mx.array(delta, mx.int32) if not isinstance(delta, mx.array) else delta
    tokens = span.shape[-2]
    if offsets.shape != (tokens,):
        message = f"{tokens} tokens cannot move by deltas of shape {offsets.shape}"
        raise ValueError(message)
    first = mx.moveaxis(span, -2, 0)
    rows = first.reshape(tokens, -1, 1, rotation.dims)
    if isinstance(delta, mx.array) or max(delta) > 0:
        rows = _kernel(rows, rotation, mx.maximum(offsets, 0), is_back=False)
    if isinstance(delta, mx.array) or min(delta) < 0:
        rows = _kernel(rows, rotation, mx.maximum(-offsets, 0), is_back=True)
    return mx.moveaxis(rows.reshape(first.shape), 0, -2)


def _kernel(
    rows: mx.array, rotation: Rotation, offset: int | mx.array, *, is_back: bool
) -> mx.array:
    # The model's own rope modules would in part apply their magnitude factor again.
    periods = None
    if rotation.frequencies is not None:
        periods = mx.array([1 / f if f else inf for f in rotation.frequencies], mx.float32)
    return mx.fast.rope(
        rows,
        rotation.dims,
        traditional=rotation.traditional,
        base=rotation.base,
        scale=-rotation.scale if is_back else rotation.scale,
        offset=offset,
        freqs=periods,
    )
