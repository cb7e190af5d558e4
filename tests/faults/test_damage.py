"""Damaged files: a read returns the right bytes or is a miss."""

import random
from dataclasses import dataclass
from functools import cache, cached_property

import pytest

from fabric.errors import CorruptDataError
from fabric.kvcache.block_file import render_block_header
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.kvcache.safetensors_header import parse_header
from node.store.block_store import BlockStore
from node.store.posix_disk import PosixDisk
from tests.faults.crash_disk import CrashDisk
from tests.support.blocks import FINGERPRINT, MIXED, SPEC, Block, make_block, with_kv

GROUPS = pytest.mark.parametrize("group", CacheGroup)


@dataclass(frozen=True)
class Case:
    """A stored block of one group, and its file."""

    block: Block
    spec: ModelCacheSpec

    @cached_property
    def store(self) -> BlockStore:
        return BlockStore(CrashDisk(), self.spec, FINGERPRINT)

    @cached_property
    def name(self) -> str:
        return f"blocks/{self.block.ref.name}.{self.block.ref.group}"

    @cached_property
    def header(self) -> bytes:
        return header_of(self.block, self.spec)

    @cached_property
    def raw(self) -> bytes:
        return self.header + self.block.payload

    def is_quarantined(self, raw: bytes) -> bool:
        """Store `raw` in the block's place; return whether it is rejected and quarantined."""
        store, files = self.store, self.store._disk.files
        files.clear()
        files[self.name] = bytes(raw)
        store._index.insert(self.block.ref, len(self.raw))
        damaged_count = store.damaged_count
        try:
            arrived = self.block.load_from(store)
        except CorruptDataError:
            assert store.damaged_count == damaged_count + 1
            assert not store.has(self.block.ref)
            [kept] = files
            return kept.startswith("quarantine/")
        assert arrived == self.block.kv
        return False


@cache
def case_of(group: CacheGroup) -> Case:
    spec = SPEC if group is CacheGroup.FULL else MIXED
    return Case(make_block(1, 3, spec, group=group), spec)


def header_of(block: Block, spec: ModelCacheSpec) -> bytes:
    ref = block.ref
    count, group = ref.tokens_count, ref.group
    return render_block_header(spec, FINGERPRINT, block.parent, ref.block_hash, count, group)


def flipped(raw: bytes, bit: int) -> bytearray:
    out = bytearray(raw)
    out[bit // 8] ^= 1 << bit % 8
    return out


@GROUPS
def test_undamaged_file_loads(group):
    case = case_of(group)
    assert not case.is_quarantined(case.raw)


@GROUPS
def test_flipped_header_bytes_are_detected(group):
    case, rng = case_of(group), random.Random(0)
    text_bytes = len(case.header.rstrip(b" "))
    for at in range(len(case.header)):
        raw = flipped(case.raw, 8 * at + rng.randrange(8))
        assert case.is_quarantined(raw), f"byte {at}"
        if at >= text_bytes + 100:
            continue  # padding: the parser stops at its first character that is not a space
        try:
            parsed = parse_header(bytes(raw[: len(case.header)]), len(raw))
        except CorruptDataError:
            continue
        assert sum(tensor.size_bytes for tensor in parsed.tensors) == len(case.block.payload)


@GROUPS
def test_flipped_payload_bits_are_detected(group):
    """Flip every bit; a small state has fewer than keys have."""
    case = case_of(group)
    bits = range(8 * len(case.header), 8 * len(case.raw))
    assert len(bits) >= 1_000
    for bit in bits:
        assert case.is_quarantined(flipped(case.raw, bit)), f"bit {bit}"


@GROUPS
def test_runs_of_zeros_and_noise_are_detected(group):
    case, rng = case_of(group), random.Random(1)
    whole = case.raw
    for _ in range(200):
        start = rng.randrange(len(whole))
        end = min(len(whole), start + rng.choice([1, 16, 512, 4096, 1 << 20]))
        for fill in (bytes(end - start), rng.randbytes(end - start)):
            raw = whole[:start] + fill + whole[end:]
            assert case.is_quarantined(raw) == (raw != whole)


@GROUPS
def test_truncated_and_extended_files_are_detected(group):
    case = case_of(group)
    raw, header_bytes = case.raw, len(case.header)
    cuts = [*range(0, header_bytes, 97), *range(header_bytes - 9, len(raw))]
    for bad in [raw[:cut] for cut in cuts] + [raw + b"\0", raw + raw, bytes(len(raw)), b""]:
        assert case.is_quarantined(bad)


@GROUPS
def test_swapped_files_are_detected(group):
    """Files of other tokens, bits, positions or groups are rejected in this block's place."""
    case, block = case_of(group), case_of(group).block
    others = [
        make_block(2, 3, case.spec, group=group),
        with_kv(block.tokens, bytes(reversed(block.kv)), case.spec, group=group),
        with_kv(block.tokens, block.kv, case.spec, block.ref.block_hash, group),
    ]
    others += [make_block(1, 3, MIXED, group=other) for other in CacheGroup if other is not group]
    for other in others:
        other_case = Case(other, MIXED if other.ref.group is not group else case.spec)
        assert case.is_quarantined(other_case.raw)
        assert other_case.is_quarantined(case.raw)


def test_damaged_block_is_quarantined_and_recomputed(tmp_path):
    case = case_of(CacheGroup.FULL)
    disk = PosixDisk(tmp_path / "root", "none")
    store = BlockStore(disk, SPEC, FINGERPRINT)
    case.block.put_into(store)
    (disk.root / case.name).write_bytes(flipped(case.raw, 8 * len(case.raw) - 1))
    with pytest.raises(CorruptDataError):
        case.block.load_from(store)
    [kept] = disk.list_names("quarantine")
    assert kept.startswith(case.block.ref.name)
    case.block.put_into(store)
    assert case.block.load_from(store) == case.block.kv
    disk.close()
