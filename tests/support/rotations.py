"""Rotations computed in float64, pair by pair: the reference for the fast kernel."""

from typing import Any

import mlx.core as mx
import numpy as np

from fabric.kvcache.rotation import Rotation


def radians_per_token(rotation: Rotation) -> tuple[float, ...]:
    """Return the angle by which each pair turns from one position to the next."""
    scale, base, dims = rotation.scale, rotation.base, rotation.dims
    if rotation.frequencies is not None:
        return tuple(scale * frequency for frequency in rotation.frequencies)
    assert base is not None
    return tuple(scale * base ** (-dim / dims) for dim in range(0, dims, 2))


def turned(rows: mx.array, rotation: Rotation, delta: Any) -> np.ndarray:
    """Rotate `[..., tokens, width]` in float64, pair by pair."""
    out = np.array(rows.astype(mx.float32), np.float64)
    angles = np.multiply.outer(np.asarray(delta), np.array(radians_per_token(rotation)))
    first, second = (list(dims) for dims in zip(*rotation.pairs, strict=True))
    x, y = out[..., first], out[..., second]
    out[..., first] = x * np.cos(angles) - y * np.sin(angles)
    out[..., second] = x * np.sin(angles) + y * np.cos(angles)
    return out


def moving_dims(rotation: Rotation) -> tuple[int, ...]:
    """List the dimensions of the stored row that change with the position, ascending."""
    turning = zip(rotation.pairs, radians_per_token(rotation), strict=True)
    return tuple(sorted(dim for pair, angle in turning if angle for dim in pair))


def still(rows: mx.array, rotation: Rotation | None) -> np.ndarray:
    """Return the rows without the dimensions that move."""
    return np.delete(np.array(rows), moving_dims(rotation) if rotation else (), axis=-1)


def close(a: Any, b: Any, relative: float) -> bool:
    a, b = np.array(a, np.float64), np.array(b, np.float64)
    return bool(np.abs(a - b).max() <= relative * np.abs(b).max())
