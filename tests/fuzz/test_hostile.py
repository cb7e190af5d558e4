"""Named attacks on stored and sent data, each refused before anything is allocated."""

import tracemalloc
from contextlib import contextmanager
from dataclasses import replace

import pytest

from fabric.codec import pack, parse_json, to_plain, unpack_plain
from fabric.errors import CorruptDataError, RejectedError
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec, TensorSpec
from fabric.kvcache.hashing import payload_checksum
from fabric.limits import DIRECTIVE_BYTES_MAX, DIRECTIVES_MAX, JSON_DEPTH_MAX, LAYERS_MAX, MIB
from fabric.net.compression import compress_slice, decompress_slice
from fabric.record.manifest import MAGIC as RECORD_MAGIC
from fabric.record.manifest import decode_manifest
from fabric.record.spec_file import MAGIC, SpecRecord, decode_spec
from node.store.block_files import parse_leaf
from node.store.block_store import BlockStore
from node.store.posix_disk import PosixDisk
from tests.fuzz.edited_inputs import DIRECTIVES, edited_record
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
def test_hostile_spec_is_rejected(name):
    body = pack(SpecRecord(FINGERPRINT, "model", HOSTILE_SPECS[name]))
    raw = MAGIC + payload_checksum([body]) + body
    with allocating_less_than(2 * MIB + 40 * len(raw)), pytest.raises(CorruptDataError):
        decode_spec(raw)


# --- depth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [JSON_DEPTH_MAX + 1, 10_000, 1_000_000])
@pytest.mark.parametrize("parts", [("[", "]"), ('{"a":', "}")])
def test_deep_json_is_rejected(depth, parts):
    opening, closing = parts
    text = opening * depth + "1" + closing * depth
    with allocating_less_than(64 * MIB), pytest.raises(RejectedError):
        parse_json(text)


@pytest.mark.parametrize("items", [4_096, 1 << 31])
@pytest.mark.parametrize("depth", [100, 1_000, 200_000])
def test_msgpack_arrays_with_huge_declared_lengths_are_rejected(items, depth):
    """Each declared length of a nested array costs at most 32 KiB, for 1,024 levels."""
    raw = ((b"\xdd" + items.to_bytes(4, "big")) * depth).ljust(8_192, b"\xc0")
    with allocating_less_than(40 * MIB), pytest.raises(RejectedError):
        unpack_plain(raw)


# --- edited records ------------------------------------------------------------------------------

EDITED, _ = edited_record()
FIRST, *_ = EDITED.pieces


def head_with(**change):
    return {"edited": {**to_plain(EDITED.edited), **change}}


def piece_with(at, **change):
    pieces = [dict(piece) for piece in to_plain(EDITED.pieces)]
    pieces[at] |= change
    return {"pieces": pieces}


def origin_with(at, **change):
    origins = [dict(origin) for origin in to_plain(EDITED.edited)["origins"]]
    origins[at] |= change
    return head_with(origins=origins)


def note_with(**change):
    (note,) = to_plain(EDITED.edited)["notes"]
    return head_with(notes=[{**note, **change}])


def directive_with(**change):
    return {"directives": [{**to_plain(DIRECTIVES[0]), **change}]}


WINDOW = {"block": to_plain(replace(FIRST.block, group=CacheGroup.WINDOW)), "end": 310}
HOSTILE_EDITS = {
    "a piece twice": {"pieces": [to_plain(FIRST), *to_plain(EDITED.pieces)]},
    "pieces that overlap": piece_with(1, end=256),
    "a piece that goes backwards": piece_with(1, start=44, end=0),
    "a piece of nothing": piece_with(1, start=44, end=44),
    "a negative position": piece_with(0, start=-1),
    "a piece beyond its block": piece_with(1, end=300),
    "computed before the start": piece_with(3, delta=10_000),
    "computed behind all tokens": piece_with(3, delta=-(1 << 40)),
    "a distance that no integer holds": piece_with(3, delta=1 << 63),
    "a moved beginning": piece_with(1, delta=-3),
    "many pieces": {"pieces": to_plain(EDITED.pieces) * 5_000},
    "an origin of another length": origin_with(0, tokens=bytes(4 * 255)),
    "an origin of many tokens": origin_with(0, tokens=bytes(4 * 100_000)),
    "an origin of half a token": origin_with(0, tokens=bytes(3)),
    "an origin of other tokens": origin_with(0, tokens=bytes(4 * 256)),
    "an origin that follows nothing": origin_with(0, parent=b""),
    "more origins than pieces": head_with(origins=to_plain(EDITED.edited)["origins"] * 9),
    "no origins": head_with(origins=[]),
    "an exact beginning behind the edits": head_with(exact_tokens=523),
    "less than no exact beginning": head_with(exact_tokens=-5),
    "a head longer than the whole": head_with(tokens_count=530),
    "a head that ends within a piece": head_with(tokens_count=500),
    "a head of many tokens": head_with(tokens_count=1 << 62),
    "many notes": head_with(notes=to_plain(EDITED.edited)["notes"] * 65),
    "a note of no time": note_with(made_s=float("nan")),
    "a note of a negative place": note_with(start=-1),
    "a note of many tokens": note_with(moved_tokens=1 << 62),
    "a note with a book for a digest": note_with(dropped_digest="x" * 100_000),
    "a window of no piece": {"windows": [WINDOW]},
    "a directive of no message": directive_with(result_of=None),
    "a directive of two messages": directive_with(message_digest=b"s" * 16),
    "a directive of a place of nothing": directive_with(at=[3, 9]),
    "a directive that goes backwards": directive_with(span=[9, 3]),
    "a directive of a negative message": directive_with(nth=-1),
    "a directive undone at no time": directive_with(undone_s=float("nan")),
    "a directive of half a digest": directive_with(result_of=None, message_digest=b"s"),
    "a directive of a long id": directive_with(result_of="x" * 300),
    "a directive of a long text": directive_with(replacement="x" * (DIRECTIVE_BYTES_MAX + 1)),
    "a directive of no time": directive_with(made_s=float("inf")),
    "many directives": {"directives": to_plain(DIRECTIVES) * DIRECTIVES_MAX},
}


def edited_with(change):
    body = pack({**to_plain(EDITED), **change})
    return RECORD_MAGIC + payload_checksum([body]) + body


@pytest.mark.parametrize("name", HOSTILE_EDITS)
def test_inconsistent_edited_record_is_rejected(name):
    assert decode_manifest(edited_with({})) == EDITED
    raw = edited_with(HOSTILE_EDITS[name])
    with allocating_less_than(2 * MIB + 40 * len(raw)), pytest.raises(CorruptDataError):
        decode_manifest(raw)


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
def test_decompression_bombs_are_rejected(frame):
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
def test_malformed_block_file_names_are_rejected(leaf):
    assert parse_leaf(leaf) is None
    assert parse_leaf(GOOD_LEAF) is not None


@pytest.mark.parametrize("to", ["itself", "a sound block", "outside", "nothing", "a folder"])
def test_symlink_in_blocks_folder_is_never_followed(tmp_path, to):
    """A read quarantines the link as a miss; a start removes it; its target stays."""
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
        "outside": outside,  # the valid bytes of this block
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
