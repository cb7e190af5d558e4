"""Named attacks on what is stored and sent: each refused, and before anything is allocated."""

import tracemalloc
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fabric.codec import pack, parse_json, unpack_plain
from fabric.errors import CorruptDataError, RejectedError
from fabric.kvcache.cache_spec import ModelCacheSpec, TensorSpec
from fabric.kvcache.hashing import payload_checksum
from fabric.limits import JSON_DEPTH_MAX, LAYERS_MAX, MIB
from fabric.net.compression import compress_slice, decompress_slice
from fabric.record.spec_file import MAGIC, SpecRecord, decode_spec
from node.store.block_files import parse_leaf
from node.store.block_store import BlockStore
from node.store.posix_disk import PosixDisk
from tests.support.blocks import FINGERPRINT, MIXED, SPEC, make_block


@contextmanager
def allocating_less_than(limit_bytes: int):
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit_bytes


# --- cache specs ---------------------------------------------------------------------------------


def spec_with(**change) -> ModelCacheSpec:
    layer = MIXED.layers[0]
    slot = replace(layer.slots[0], **change)
    return replace(MIXED, layers=(replace(layer, slots=(slot,)),))


def spec_with_state(**change) -> ModelCacheSpec:
    state = replace(TensorSpec("state.0", "F32", (1, 2)), **change)
    return replace(MIXED, layers=(replace(MIXED.layers[2], states=(state,)),))


HOSTILE_SPECS = {
    "no layers": ModelCacheSpec(()),
    "many layers": ModelCacheSpec((MIXED.layers[0],) * (LAYERS_MAX + 1)),
    "many tensors": replace(
        MIXED, layers=(replace(MIXED.layers[0], slots=MIXED.layers[0].slots * 1_000),)
    ),
    "negative heads": spec_with(heads=-1),
    "no width": spec_with(width=0),
    "a huge width": spec_with(width=1 << 40),
    "a block over the limit": spec_with(heads=1 << 20, width=1 << 10),
    "three-word rows": spec_with(width=8, group_size=8, bits=2),
    "unknown bits": spec_with(bits=5),
    "no group": spec_with(group_size=0),
    "unknown dtype": spec_with(dtype="F64"),
    "a path as a name": spec_with(name="../keys"),
    "a negative state": spec_with_state(shape=(1, -2)),
    "a huge state": spec_with_state(shape=(1 << 31,)),
    "a state over the limit": spec_with_state(shape=(1 << 30,)),
    "a state of many dims": spec_with_state(shape=(1,) * 9),
    "a state of unknown dtype": spec_with_state(dtype="X"),
    "one name twice": replace(
        MIXED, layers=(replace(MIXED.layers[0], slots=MIXED.layers[0].slots[:1] * 2),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_SPECS)
def test_no_block_is_laid_out_by_a_hostile_spec(name):
    body = pack(SpecRecord(FINGERPRINT, "model", HOSTILE_SPECS[name]))
    raw = MAGIC + payload_checksum([body]) + body
    with allocating_less_than(2 * MIB + 40 * len(raw)), pytest.raises(CorruptDataError):
        decode_spec(raw)


# --- depth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [JSON_DEPTH_MAX + 1, 10_000, 1_000_000])
@pytest.mark.parametrize("parts", [("[", "]"), ('{"a":', "}")])
def test_deep_json(depth, parts):
    opening, closing = parts
    text = opening * depth + "1" + closing * depth
    with allocating_less_than(64 * MIB), pytest.raises(RejectedError):
        parse_json(text)


@pytest.mark.parametrize("items", [4_096, 1 << 31])
@pytest.mark.parametrize("depth", [100, 1_000, 200_000])
def test_msgpack_of_arrays_that_claim_much(items, depth):
    """Nested promises of long arrays cost at most 32 KiB each, for 1,024 levels."""
    raw = ((b"\xdd" + items.to_bytes(4, "big")) * depth).ljust(8_192, b"\xc0")
    with allocating_less_than(40 * MIB), pytest.raises(RejectedError):
        unpack_plain(raw)


# --- compressed slices ---------------------------------------------------------------------------

BOMB = compress_slice(bytes(64 * MIB))


@pytest.mark.parametrize(
    "frame",
    [
        BOMB,
        compress_slice(bytes(1_000)) + BOMB,
        compress_slice(bytes(1_000)) * 1_000,
        b"\x28\xb5\x2f\xfd\x80\xf8" + (1_000).to_bytes(4, "little") + b"\x03\x00\x00",
        b"\x28\xb5\x2f\xfd\xc0\x00" + (1 << 62).to_bytes(8, "little") + b"\x03\x00\x00",
    ],
    ids=["64 MiB", "a second frame", "a thousand frames", "a huge window", "four exabytes"],
)
def test_bombs(frame):
    buffer = bytearray(2_000)
    into = memoryview(buffer)[:1_000]
    with allocating_less_than(4 * MIB), pytest.raises(CorruptDataError):
        decompress_slice(frame, into)
    assert buffer[1_000:] == bytes(1_000)


# --- names and links -----------------------------------------------------------------------------

GOOD_LEAF = f"{'a' * 64}-{'b' * 32}.full"


@pytest.mark.parametrize(
    "leaf",
    [
        *("", "..", "../blocks", "/etc/passwd", GOOD_LEAF.upper(), GOOD_LEAF + "\n"),
        *(GOOD_LEAF + "/../x", "../" + GOOD_LEAF, GOOD_LEAF.replace("full", "FULL")),
        *(GOOD_LEAF[1:], GOOD_LEAF.replace("full", "other"), GOOD_LEAF.replace("a", "\u0661")),
    ],
)
def test_no_other_name_is_a_block(leaf):
    assert parse_leaf(leaf) is None
    assert parse_leaf(GOOD_LEAF) is not None


@pytest.mark.parametrize("to", ["itself", "a sound block", "outside", "nothing", "a folder"])
def test_a_link_in_the_blocks_folder_is_never_followed(tmp_path, to):
    """Read, it is a miss and put away; at a start it is removed; what it points to stays."""
    block, other = make_block(1), make_block(2)
    disk = PosixDisk(tmp_path / "root", "none")
    store = BlockStore(disk, SPEC, FINGERPRINT)
    block.put_into(store)
    other.put_into(store)
    path = disk.root / "blocks" / f"{block.ref.name}.full"
    outside = tmp_path / "outside"
    path.rename(outside)
    targets = {
        "itself": path,
        "a sound block": path.with_name(f"{other.ref.name}.full"),
        "outside": outside,  # the very bytes that belong here
        "nothing": tmp_path / "nothing",
        "a folder": tmp_path,
    }
    path.symlink_to(targets[to])

    with pytest.raises(CorruptDataError):
        block.load_from(store)
    assert not store.has(block.ref)
    [kept] = disk.list_names("quarantine")
    assert (disk.root / "quarantine" / kept).is_symlink()

    path.symlink_to(targets[to])
    again = BlockStore(disk, SPEC, FINGERPRINT)
    again.recover()
    assert not path.is_symlink()
    assert (again.has(block.ref), again.has(other.ref)) == (False, True)
    assert other.load_from(again) == other.kv
    assert outside.exists()
    disk.close()
