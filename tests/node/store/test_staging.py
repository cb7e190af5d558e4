"""Bytes are staged to their places, for places of any shape."""

import random

import numpy as np
import pytest

from fabric.kvcache.block_chain import block_spans
from fabric.limits import BLOCK_TOKENS
from node.store.staging import PORTION_BYTES, portions, staging_buffer
from tests.support.blocks import FINGERPRINT, SALT


def rows(heads: int, capacity: int, width: int, start: int, end: int):
    """Return a cache-like array and the view of some of its tokens."""
    whole = np.zeros((heads, capacity, width), np.uint8)
    return whole, whole[:, start:end]


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1, 1, 0, 1)],
        [(8, 512, 64, 128, 384), (8, 512, 4, 128, 384), (8, 512, 4, 128, 384)],
        [(2, 16, PORTION_BYTES // 8, 1, 15)],  # each head is larger than the buffer
        [(1, 2, PORTION_BYTES, 0, 2), (3, 7, 5, 2, 4)],  # contiguous and larger
        [(4, 300, 1024, 7, 291)] * 3,
        [(2, 400, 64, 3, 131), (2, 400, 4, 3, 131)] * 40,
        [(3, 300, 4, 0, 9), (0, 300, 4, 0, 9), (2, 64, 1024, 0, 64)],
    ],
)
def test_every_byte_is_put_in_its_place(shapes):
    arrays = [rows(*shape) for shape in shapes]
    raw = np.random.default_rng(0).integers(1, 256, sum(p.size for _, p in arrays), np.uint8)
    at = 0
    for portion in portions([place for _, place in arrays]):
        size_bytes = portion.view.nbytes
        assert 0 < size_bytes <= PORTION_BYTES
        assert np.shares_memory(np.asarray(portion.view), staging_buffer())
        portion.view[:] = raw[at : at + size_bytes].data
        at += size_bytes
        portion.put_in_place()
    assert at == raw.size
    at = 0
    for whole, place in arrays:
        assert place.tobytes() == raw[at : at + place.size].tobytes()
        assert np.count_nonzero(whole) == place.size  # and no other byte was touched
        at += place.size


@pytest.mark.parametrize("seed", range(20))
def test_known_names_give_the_same_names_as_hashing_again(seed):
    """Names reused from another sequence equal those computed by hashing again."""
    rng = random.Random(seed)
    old = [rng.randrange(1 << 16) for _ in range(rng.randrange(1, 5 * BLOCK_TOKENS))]
    same = rng.choice([0, rng.randrange(len(old) + 1), len(old)])
    new = [*old[:same], *(rng.randrange(1 << 16, 1 << 17) for _ in range(rng.randrange(1, 700)))]
    known = block_spans(SALT, FINGERPRINT, old)
    assert block_spans(SALT, FINGERPRINT, new, known, same) == block_spans(SALT, FINGERPRINT, new)
    cut = new[: max(1, same // 2)]
    assert block_spans(SALT, FINGERPRINT, cut, known, same) == block_spans(SALT, FINGERPRINT, cut)
