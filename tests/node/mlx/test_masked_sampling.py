"""Sampling under a format's mask: all probability is shared among the allowed tokens."""

import mlx.core as mx
import numpy as np
import pytest

from fabric.turn.generation import Sampling
from node.mlx.sampling import make_sampler, unpack_mask

VOCABULARY = 70
LIKELY, ALLOWED = 5, (33, 40, 69)


@pytest.fixture
def logits():
    row = np.full((1, VOCABULARY), -4.0, np.float32)
    row[0, LIKELY] = 200.0  # all others underflow to zero in 32 bits
    row[0, 33], row[0, 40] = 2.0, 1.9
    return mx.array(row)


@pytest.fixture
def allowed():
    bits = np.zeros(96, np.uint8)
    bits[list(ALLOWED)] = 1
    return unpack_mask(np.packbits(bits, bitorder="little").view(np.uint32), VOCABULARY)


def sampled(sampling, logits, allowed, openings=(), count=60):
    sampler = make_sampler(sampling, 7, [1], VOCABULARY)
    return {int(sampler.sample(logits, allowed, openings)[0].item()) for _ in range(count)}


def test_mask_bits_are_unpacked_to_the_vocabulary_width(allowed):
    assert allowed.shape == (1, VOCABULARY)
    assert np.flatnonzero(np.array(allowed)).tolist() == list(ALLOWED)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"temperature": 0.0}, {33}),
        ({"temperature": 1.0}, {33, 40}),
        ({"temperature": 1.0, "top_p": 0.9}, {33, 40}),
        ({"temperature": 1.0, "top_p": 0.4}, {33}),
        ({"temperature": 1.0, "top_k": 1}, {33}),
        ({"temperature": 1.0, "min_p": 0.5}, {33, 40}),
        ({"temperature": 0.0, "logit_bias": {"69": 50.0}}, {69}),
        ({"temperature": 0.0, "logit_bias": {"33": -100.0}}, {40}),
        ({"temperature": 0.0, "logit_bias": {"5": 90.0}}, {33}),
    ],
    ids=str,
)
def test_every_sampling_parameter_applies_within_the_mask(logits, allowed, more, expected):
    assert sampled(Sampling(**more), logits, allowed) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_thought_opening_is_sampled_only_if_likeliest(logits, allowed, temperature):
    sampling = Sampling(temperature=temperature)
    assert sampled(sampling, logits, allowed, openings=(60, LIKELY)) == {LIKELY}
    assert sampled(sampling, logits, allowed, openings=(60,)) <= set(ALLOWED)
