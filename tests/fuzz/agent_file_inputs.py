"""Hibernation files as fuzz inputs: bytes changed blindly, and frames changed and signed again."""

import random
from dataclasses import replace

import msgpack
from xxhash import xxh3_128

from fabric.codec import pack
from fabric.errors import CorruptDataError, RejectedError
from fabric.ids import TenantId
from fabric.kvcache.hashing import payload_checksum
from fabric.record.hibernation_file import (
    HEAD_BYTES,
    TAG_BYTES,
    FrameKind,
    HibernationHeader,
    SignedWith,
    _TagChain,
    caller_signing_key,
    encode_file,
    key_id,
    open_reader,
    peek_header,
)
from fabric.record.hibernation_file import MAGIC as FILE_MAGIC
from fabric.record.manifest import MAGIC, Manifest, Placed, decode_manifest, encode_manifest
from fabric.record.rekey import rekey_record
from tests.fuzz.bounds_inputs import rebuilt_bounds, require_bounds
from tests.fuzz.edited_inputs import edited_record, rebuilt_edits, use
from tests.fuzz.mutation import mutate_bytes, mutate_tree, spell_msgpack
from tests.support.blocks import MIXED, SALT, Block, make_block, make_manifest, with_kv

KEY = caller_signing_key(b"k" * 32)
RAISES = (RejectedError, CorruptDataError)
VOCABULARY = 1 << 16
Frames = list[tuple[int, bytes]]


def parse_agent_file(raw: bytes) -> object:
    """Read a file as a resuming node does, up to the point where it would write blocks."""
    header = peek_header(raw)
    if header is None:
        message = "cut short"
        raise RejectedError(message)
    reader = open_reader(header, KEY)
    record = bytearray()
    for at in range(0, len(raw), 4_096):
        for frame in reader.feed(raw[at : at + 4_096]):
            if frame.kind is FrameKind.RECORD:
                record += frame.body
    reader.finish()
    resumed = rekey_record(decode_manifest(bytes(record)), header, MIXED, SALT, VOCABULARY)
    require_bounds(resumed.record)
    use(resumed.record)
    return resumed


def agent_file_seeds() -> list[bytes]:
    full = make_block(1, 256, MIXED)
    tail = make_block(2, 9, MIXED, full.ref.block_hash)
    window = with_kv(tail.tokens, tail.kv, MIXED, tail.parent, tail.ref.group.WINDOW)
    record = replace(make_manifest([full, tail]), windows=(Placed(window.ref, 265),))
    return [_file(record, [full, tail, window]), _file(*edited_record())]


def _file(record: Manifest, blocks: list[Block]) -> bytes:
    """Sign a file of a record and its blocks, each as often as the record names it."""
    by_ref = {block.ref: block for block in blocks}
    blocks = [by_ref[ref] for ref in record.refs]
    header = HibernationHeader(
        signed_with=SignedWith.KEY,
        key_id=key_id(KEY),
        salt=b"salt",
        tenant=TenantId(""),
        agent=record.agent,
        fingerprint=record.fingerprint,
        model="mixed",
        epoch=record.epoch,
        revision=record.revision,
        tokens_count=record.tokens_count,
        blocks_count=len(blocks),
        record_bytes=len(encode_manifest(record)),
        payload_bytes=sum(len(block.payload) for block in blocks),
        created_s=1.5,
    )
    payloads = [memoryview(block.payload) for block in blocks]
    return b"".join(encode_file(header, encode_manifest(record), payloads, KEY))


def frames_of(raw: bytes) -> Frames:
    frames, at = [], len(FILE_MAGIC)
    while at < len(raw):
        length = int.from_bytes(raw[at + 4 : at + 8], "little")
        frames.append((raw[at], raw[at + HEAD_BYTES : at + HEAD_BYTES + length]))
        at += HEAD_BYTES + length + TAG_BYTES
    return frames


def signed(frames: Frames) -> bytes:
    """Serialize frames with the tags of their signer."""
    chain, checksum, out = _TagChain(KEY), xxh3_128(FILE_MAGIC), bytearray(FILE_MAGIC)
    for kind, body in frames:
        body = checksum.digest() if kind == FrameKind.END else body  # noqa: PLW2901
        head = bytes([kind, 0, 0, 0]) + len(body).to_bytes(4, "little")
        whole = head + body + chain.next(head, body)
        checksum.update(whole)
        out += whole
    return bytes(out)


def rebuilt_agent_file(rng: random.Random, seed: bytes) -> bytes:
    """Change one frame, or the frames' order, as a holder of the key could."""
    frames = frames_of(seed)
    at = rng.randrange(len(frames))
    kind, body = frames[at]
    chance = rng.random()
    if chance < 0.1:
        rng.shuffle(frames)
    elif chance < 0.2:
        frames[at:at] = [frames[rng.randrange(len(frames))]]
    elif kind == FrameKind.HEADER:
        frames[at] = kind, spell_msgpack(rng, mutate_tree(rng, msgpack.unpackb(body)))
    elif kind == FrameKind.RECORD:
        frames = _with_other_record(rng, frames, body)
    else:
        frames[at] = kind, mutate_bytes(rng, body, [body])
    return signed(frames)


def _with_other_record(rng: random.Random, frames: Frames, record: bytes) -> Frames:
    """Change the record, checksum it again, and update its length in the header."""
    lead = len(MAGIC) + 16
    body = record[lead:]
    chance = rng.random()
    if chance < 0.4:
        body = rebuilt_edits(rng, body)
    elif chance < 0.6:
        body = rebuilt_bounds(rng, body)
    else:
        body = spell_msgpack(rng, mutate_tree(rng, msgpack.unpackb(body)))
    mutated = MAGIC + payload_checksum([body]) + body
    header = msgpack.unpackb(frames[0][1]) | {"record_bytes": len(mutated)}
    return [
        (frames[0][0], pack(header)),
        *((k, mutated if k == FrameKind.RECORD else b) for k, b in frames[1:]),
    ]
