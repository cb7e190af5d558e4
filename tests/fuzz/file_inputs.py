"""Stored files as fuzz inputs: headers, block files, records and specs, valid and hostile."""

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgpack

from fabric.codec import parse_json
from fabric.ids import CHECKSUM_BYTES, MigrationId, NodeName
from fabric.kvcache.block_file import parse_parent, read_block_header, render_block_header
from fabric.kvcache.cache_spec import CacheGroup, TensorSpec
from fabric.kvcache.hashing import payload_checksum
from fabric.kvcache.rotation import Rotation
from fabric.kvcache.safetensors_header import LENGTH_BYTES, parse_header, render_header
from fabric.record.manifest import MAGIC, Placed, decode_manifest, encode_manifest
from fabric.record.provenance import LastServed, Provenance, TruncatedBy
from fabric.record.spec_file import SpecRecord, encode_spec
from fabric.record.stored_part import misplaced_refs, truncate_record
from tests.fuzz.bounds_inputs import rebuilt_bounds, require_bounds
from tests.fuzz.edited_inputs import DIRECTIVES, edited_record, rebuilt_edits, use
from tests.fuzz.mutation import mutate_bytes, mutate_tree, spell_json, spell_msgpack
from tests.support.blocks import (
    FINGERPRINT,
    MIXED,
    SALT,
    Block,
    make_block,
    make_manifest,
    with_kv,
)

Rng = random.Random


def rebuilt_msgpack(rng: Rng, body: bytes) -> bytes:
    return spell_msgpack(rng, mutate_tree(rng, msgpack.unpackb(body)))


def enclosed(enclose: Callable[[bytes], bytes], lead_bytes: int, rng: Rng, seed: bytes) -> bytes:
    """Mutate a seed after its first `lead_bytes`, and enclose it again."""
    body = seed[lead_bytes:]
    inner = rebuilt_msgpack(rng, body) if rng.random() < 0.8 else mutate_bytes(rng, body, [body])
    return enclose(inner)


def rebuilt_record(rng: Rng, seed: bytes) -> bytes:
    """Mutate a record anywhere, or only its edits, or only what numeric bounds limit."""
    lead = len(MAGIC) + CHECKSUM_BYTES
    enclose = partial(checksummed, MAGIC)
    chance = rng.random()
    if chance < 0.4:
        return enclose(rebuilt_edits(rng, seed[lead:]))
    if chance < 0.6:
        return enclose(rebuilt_bounds(rng, seed[lead:]))
    return enclosed(enclose, lead, rng, seed)


# --- safetensors headers -------------------------------------------------------------------------

DATA_BYTES = 300


def parse_any_header(raw: bytes) -> object:
    return parse_header(raw, len(raw) + DATA_BYTES)


def header_seeds() -> list[bytes]:
    tensors = [
        TensorSpec("layers.0.keys.codes", "U32", (2, 4, 8)),
        TensorSpec("tokens", "U32", (11,)),
    ]
    return [
        render_header(tensors, {"format": "x", "group": "full"}, align_bytes=8),
        render_header([TensorSpec("a", "U8", (DATA_BYTES,))], {}, align_bytes=1),
        render_header([TensorSpec(c, "F16", (5, 5, 2)) for c in "abc"], {"k": "v"}, 64),
    ]


def rebuilt_header(rng: Rng, seed: bytes) -> bytes:
    body = spell_json(rng, mutate_tree(rng, parse_json(seed[LENGTH_BYTES:])))
    body += b" " * rng.choice((0, 0, 1, 7))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


# --- block files ---------------------------------------------------------------------------------

LENGTH = struct.Struct("<I")


def parse_block_file(raw: bytes) -> object:
    """Parse `payload length, header` as an offline check does, without and then with the spec."""
    payload_bytes = LENGTH.unpack(raw[:4].ljust(4, b"\0"))[0]
    header = raw[4:]
    block_header = read_block_header(header, len(header) + payload_bytes)
    if len(header) != block_header.data_start:
        return block_header
    count, group = block_header.tokens_count, block_header.group
    parent = parse_parent(header, MIXED, FINGERPRINT, block_header.block_hash, count, group)
    assert parent == block_header.parent
    return block_header


def block_seeds() -> list[bytes]:
    blocks = [make_block(n, n, MIXED, group=group) for n in (1, 40, 256) for group in CacheGroup]
    return [LENGTH.pack(len(block.payload)) + header_of(block) for block in blocks]


def header_of(block: Block) -> bytes:
    ref = block.ref
    count, group = ref.tokens_count, ref.group
    return render_block_header(MIXED, FINGERPRINT, block.parent, ref.block_hash, count, group)


def rebuilt_block(rng: Rng, seed: bytes) -> bytes:
    """Change the header's tree, mostly padded to the length it had; or name another parent."""
    raw, whole = rebuilt_header(rng, seed[4:]), seed[4:]
    missing = len(whole) - len(raw)
    if rng.random() < 0.05:
        at = whole.index(b'"parent":"') + len(b'"parent":"')
        return seed[:4] + whole[:at] + rng.randbytes(32).hex().encode() + whole[at + 64 :]
    if rng.random() < 0.5 and missing > 0:
        body = raw[LENGTH_BYTES:] + b" " * missing
        raw = len(body).to_bytes(LENGTH_BYTES, "little") + body
    return seed[:4] + raw


# --- records and specs ---------------------------------------------------------------------------


def parse_record(raw: bytes) -> object:
    """Decode a record, and use it as nodes and offline checks do."""
    record = decode_manifest(raw)
    pieces = record.pieces.slice(0, record.tokens_count)
    assert all(0 <= piece.start < piece.end <= piece.block.tokens_count for piece in pieces)
    require_bounds(record)
    use(record)
    lost = misplaced_refs(record, SALT)
    lost.update(record.refs[len(record.refs) // 2 :])
    cut = truncate_record(record, lost)
    cut.check()
    assert not lost & set(cut.refs)
    return record


NOTES = Provenance(
    LastServed(NodeName("node-a"), 17), 3, is_kept=True, truncated_by=TruncatedBy.FSCK
)


def record_seeds() -> list[bytes]:
    full = make_block(1, 256, MIXED)
    tail = make_block(2, 9, MIXED, full.ref.block_hash)
    window = with_kv(tail.tokens, tail.kv, MIXED, tail.parent, CacheGroup.WINDOW)
    plain = make_manifest([full, tail])
    return [
        encode_manifest(record)
        for record in (
            plain,
            replace(plain, windows=(Placed(window.ref, 265),), provenance=NOTES, sketch=(1, 2)),
            replace(make_manifest([tail]), group="g", migration=MigrationId("m" * 8), used_s=1.5),
            make_manifest([]),
            edited_record()[0],
            replace(edited_record()[0], directives=DIRECTIVES),
        )
    ]


def checksummed(magic: bytes, body: bytes) -> bytes:
    return magic + payload_checksum([body]) + body


def spec_seeds() -> list[bytes]:
    turning = Rotation(
        "keys", 0, 4, traditional=False, base=None, scale=1.0, frequencies=(1.0, 0.5)
    )
    layers = tuple(replace(layer, rotations=(turning,)) for layer in MIXED.layers)
    return [
        encode_spec(SpecRecord(FINGERPRINT, "model", spec))
        for spec in (MIXED, replace(MIXED, layers=layers))
    ]
