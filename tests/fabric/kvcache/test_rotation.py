"""Rotations by row dimension, and invalid ones."""

import math
from dataclasses import replace

import pytest

from fabric.codec import dump_json, from_plain, pack, parse_json, unpack
from fabric.errors import RejectedError
from fabric.kvcache.rotation import CacheRotations, Rotation, UnknownRotation
from tests.support.rotations import moving_dims, radians_per_token

PLAIN = Rotation("keys", 2, 6, traditional=False, base=64.0, scale=0.5, frequencies=None)
OWN = Rotation("values", 0, 4, traditional=True, base=None, scale=1.0, frequencies=(1 / 3, 0.0))


def test_rotation_pairs_halves_or_neighbors():
    assert PLAIN.pairs == ((2, 5), (3, 6), (4, 7))
    assert replace(PLAIN, traditional=True).pairs == ((2, 3), (4, 5), (6, 7))


def test_angles_follow_from_base_or_explicit_frequencies():
    assert radians_per_token(PLAIN) == pytest.approx((0.5, 0.5 / 4, 0.5 / 16))
    assert radians_per_token(replace(OWN, scale=0.25)) == (1 / 12, 0.0)


def test_pair_with_zero_frequency_does_not_rotate():
    assert moving_dims(PLAIN) == (2, 3, 4, 5, 6, 7)
    assert moving_dims(OWN) == (0, 1)
    assert moving_dims(replace(OWN, traditional=False)) == (0, 2)


@pytest.mark.parametrize("value", [(PLAIN, OWN), (), UnknownRotation("why")])
def test_rotations_round_trip_exactly_in_json_and_msgpack(value):
    from_json = from_plain(CacheRotations, parse_json(dump_json({"r": value}))["r"])
    assert from_json == unpack(CacheRotations, pack(value)) == value


@pytest.mark.parametrize(
    "wrong",
    [
        {"slot": "queries"},
        {"start": -1},
        {"dims": 5},
        {"dims": 0},
        {"scale": math.inf},
        {"base": None},
        {"base": 0.0},
        {"base": math.nan},
        {"frequencies": (1.0, 0.5, 0.25)},
        {"base": None, "frequencies": (1.0,)},
        {"base": None, "frequencies": (1.0, math.nan, 1.0)},
        {"base": None, "frequencies": (1.0, math.inf, 1.0)},
    ],
)
def test_invalid_rotation_is_rejected(wrong):
    with pytest.raises(RejectedError, match="rotation: "):
        replace(PLAIN, **wrong)
