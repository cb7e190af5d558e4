"""Stored rows moved to other positions, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from fabric.kvcache.rotation import Rotation
from node.mlx.rotate import rotate
from tests.support.rotations import close, still, turned

DELTAS = (5, -3, 1000, 0, 12_345, -7)
ROTATIONS = {
    "whole": Rotation("keys", 0, 64, traditional=False, base=1e4, scale=1.0, frequencies=None),
    "head": Rotation("keys", 0, 16, traditional=True, base=5e5, scale=0.25, frequencies=None),
    "middle": Rotation("index", 8, 32, traditional=False, base=1e4, scale=1.0, frequencies=None),
    "tail": Rotation("values", 48, 16, traditional=True, base=1e4, scale=1.0, frequencies=None),
    "own": Rotation("keys", 0, 64, False, None, 1.0, (*(0.9**i for i in range(16)), *(0.0,) * 16)),
}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("delta", [37, -500, 20_000, DELTAS], ids=str)
def test_rotate_moves_every_token_by_its_delta(name, lead, delta):
    """A shift by one number must not count up along the tokens, as the kernel does."""
    rotation = ROTATIONS[name]
    mx.random.seed(1)
    rows = mx.random.normal((*lead, len(DELTAS), 64))
    moved = rotate(rows, rotation, delta)
    wanted = turned(rows, rotation, delta if isinstance(delta, tuple) else [delta] * len(DELTAS))

    assert moved.shape == rows.shape
    assert close(moved, wanted, 2e-3 if abs(np.max(delta)) > 10_000 else 2e-4)
    assert np.array_equal(still(moved, rotation), still(rows, rotation))


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("delta", [37, -37, (5, 3), (-5, -3), DELTAS, (0, 0)], ids=str)
def test_rope_offsets_are_never_negative(delta, array, monkeypatch):
    """Metal's kernel would read it as four billion; the CPU's does not."""
    offsets, rope = [], mx.fast.rope

    def record_offset(*args, offset, **options):
        offsets.append(offset if isinstance(offset, int) else offset.min().item())
        return rope(*args, offset=offset, **options)

    monkeypatch.setattr(mx.fast, "rope", record_offset)
    is_one = isinstance(delta, int)
    rows = mx.random.normal((2, 1 if is_one else len(delta), 64))
    moved = rotate(rows, ROTATIONS["head"], delta if is_one or not array else mx.array(delta))

    assert close(moved, turned(rows, ROTATIONS["head"], [delta] if is_one else delta), 2e-4)
    assert all(offset >= 0 for offset in offsets)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_rotate_keeps_the_dtype_of_rows(dtype):
    rows = mx.random.normal((2, 5, 64)).astype(dtype)
    moved = rotate(rows, ROTATIONS["whole"], 500)
    assert moved.dtype == dtype
    assert close(moved.astype(mx.float32), turned(rows, ROTATIONS["whole"], [500] * 5), 1e-2)
    assert mx.array_equal(rotate(rows, ROTATIONS["whole"], 0), rows)


@pytest.mark.parametrize("deltas", [[1, 2], [[1] * 6], mx.array(3)], ids=str)
def test_deltas_must_be_one_per_token(deltas):
    with pytest.raises(ValueError, match="6 tokens cannot move"):
        rotate(mx.zeros((2, 6, 64)), ROTATIONS["whole"], deltas)


def test_rows_must_be_at_least_as_wide_as_the_rotation():
    with pytest.raises(ValueError, match="have no dimensions 48 to 64"):
        rotate(mx.zeros((2, 6, 60)), ROTATIONS["tail"], 1)
