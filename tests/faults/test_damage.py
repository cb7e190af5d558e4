"""Damaged files: a read gives the right bytes or a miss, never others."""

import random

import pytest

from fabric.block_file import render_block_header
from fabric.errors import CorruptDataError
from fabric.safetensors_header import parse_header
from node.block_store import BlockStore
from node.posix_disk import PosixDisk
from tests.faults.crash_disk import CrashDisk
from tests.support.blocks import (
    FINGERPRINT,
    SPEC,
    make_block,
    with_kv,
)

BLOCK = make_block(1, 3)
NAME = f"blocks/{BLOCK.ref.name}.full"
HEADER = render_block_header(SPEC, FINGERPRINT, BLOCK.parent, BLOCK.ref.block_hash, 3)
RAW = HEADER + BLOCK.payload


def is_a_miss(raw: bytes, block=BLOCK) -> bool:
    """Put `raw` where the block lies; tell whether it is refused and taken out of use."""
    disk = CrashDisk(files={f"blocks/{block.ref.name}.full": bytes(raw)})
    store = BlockStore(disk, SPEC, FINGERPRINT)
    store._index.insert(block.ref, len(RAW))
    try:
        arrived = block.load_from(store)
    except CorruptDataError:
        return not store.has(block.ref) and disk.list_names("blocks") == []
    assert arrived == block.kv
    return False


def flipped(raw: bytes, bit: int) -> bytearray:
    out = bytearray(raw)
    out[bit // 8] ^= 1 << bit % 8
    return out


def test_the_undamaged_file_loads():
    assert not is_a_miss(RAW)


def test_every_header_byte_flipped():
    rng = random.Random(0)
    for at in range(len(HEADER)):
        raw = flipped(RAW, 8 * at + rng.randrange(8))
        assert is_a_miss(raw), f"byte {at}"
        try:
            parsed = parse_header(bytes(raw[: len(HEADER)]), len(raw))
        except CorruptDataError:
            continue
        assert sum(tensor.size_bytes for tensor in parsed.tensors) == len(BLOCK.payload)


def test_every_payload_bit_flipped():
    for bit in range(8 * len(HEADER), 8 * len(RAW)):
        assert is_a_miss(flipped(RAW, bit)), f"bit {bit}"


def test_runs_of_zeros_and_noise():
    rng = random.Random(1)
    for _ in range(500):
        start = rng.randrange(len(RAW))
        end = min(len(RAW), start + rng.choice([1, 16, 512, 4096, 1 << 20]))
        for fill in (bytes(end - start), rng.randbytes(end - start)):
            raw = RAW[:start] + fill + RAW[end:]
            assert is_a_miss(raw) == (raw != RAW)


def test_every_truncation_and_extension():
    cuts = [*range(0, len(HEADER), 97), *range(len(HEADER) - 9, len(RAW))]
    for raw in [RAW[:cut] for cut in cuts] + [RAW + b"\0", RAW + RAW, bytes(len(RAW)), b""]:
        assert is_a_miss(raw)


def test_swapped_files():
    same_tokens = with_kv(BLOCK.tokens, bytes(reversed(BLOCK.kv)))
    same_bits = with_kv(BLOCK.tokens, BLOCK.kv, parent=BLOCK.ref.block_hash)
    for other in (make_block(2, 3), same_tokens, same_bits):
        header = render_block_header(SPEC, FINGERPRINT, other.parent, other.ref.block_hash, 3)
        assert is_a_miss(header + other.payload)
        assert is_a_miss(RAW, other)


def test_a_damaged_block_is_put_away_and_can_be_computed_again(tmp_path):
    disk = PosixDisk(tmp_path / "root", "none")
    store = BlockStore(disk, SPEC, FINGERPRINT)
    BLOCK.put_into(store)
    (disk.root / NAME).write_bytes(flipped(RAW, 8 * len(RAW) - 1))
    with pytest.raises(CorruptDataError):
        BLOCK.load_from(store)
    [kept] = disk.list_names("quarantine")
    assert kept.startswith(BLOCK.ref.name)
    BLOCK.put_into(store)
    assert BLOCK.load_from(store) == BLOCK.kv
    disk.close()
