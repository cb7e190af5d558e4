"""Long lists as arrays: they behave as tuples, and their encoding is unchanged."""

import random
from dataclasses import replace

import pytest

from fabric.codec import pack
from fabric.errors import CorruptDataError
from fabric.record.manifest import decode_manifest, encode_manifest
from fabric.u32s import U32s
from tests.support.blocks import make_block, make_manifest

NUMBERS = tuple(random.Random(0).randrange(1 << 32) for _ in range(50))
LEAD_BYTES = 24  # magic and checksum


def test_u32s_behaves_as_a_tuple():
    ours = U32s(NUMBERS)
    assert (tuple(ours), len(ours), list(ours)) == (NUMBERS, 50, list(NUMBERS))
    assert (ours[3], ours[-1], ours[5:9]) == (NUMBERS[3], NUMBERS[-1], NUMBERS[5:9])
    assert ours + U32s([1, 2]) == (*NUMBERS, 1, 2)
    assert ours[:10] + ours[10:] == ours == list(NUMBERS)
    assert ours != U32s(NUMBERS[1:])
    assert ours != (*NUMBERS[1:], 0)
    assert len({ours, U32s(NUMBERS)}) == 1
    assert not U32s()
    assert str(NUMBERS[0]) not in repr(ours)
    assert U32s.unpack(ours.pack()) == ours


@pytest.mark.parametrize(
    ("numbers", "holds"),
    [((), True), ((7,), True), ((1, 1, 2), True), ((1, 3, 2), False), (((1 << 32) - 1, 0), False)],
)
def test_is_ascending_compares_neighbors(numbers, holds):
    assert U32s(numbers).is_ascending() is holds


@pytest.mark.parametrize("number", [-1, 1 << 32])
def test_values_beyond_32_bits_are_rejected(number):
    with pytest.raises(CorruptDataError):
        U32s([number])
    with pytest.raises(CorruptDataError):
        replace(make_manifest([make_block(1)]), token_ids=(number, 0))


@pytest.mark.parametrize("tokens_count", [0, 1, 63, 64, 256])
@pytest.mark.parametrize("blocks_count", [1, 20, 80])
def test_record_packs_like_any_message(tokens_count, blocks_count):
    blocks = (
        [make_block(seed, tokens_count) for seed in range(blocks_count)] if tokens_count else []
    )
    record = make_manifest(blocks)
    raw = encode_manifest(record)
    assert raw[LEAD_BYTES:] == pack(record)
    assert decode_manifest(raw) == record
