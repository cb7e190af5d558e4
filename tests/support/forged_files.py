"""Hibernation files with a valid signature and invalid contents."""

import struct
from dataclasses import replace

from fabric.ids import AgentId
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import payload_checksum
from fabric.record.hibernation_file import (
    FrameKind,
    FrameReader,
    caller_signing_key,
    encode_file,
    key_id,
    peek_header,
)
from fabric.record.manifest import Placed, decode_manifest
from fabric.record.piece_table import PieceTable
from tests.support.blocks import sealed_unchecked
from tests.support.hibernation import BROUGHT_KEY

LEAVES = caller_signing_key(BROUGHT_KEY)


def _with_checksums(record, payloads):
    """Replace the checksums of a record's blocks by those of the payloads."""
    pieces = [
        replace(piece, block=replace(piece.block, checksum=payload_checksum([payload])))
        for piece, payload in zip(record.pieces, payloads, strict=True)
    ]
    return replace(record, pieces=PieceTable(tuple(pieces)))


def forged(
    raw, *, record=lambda record: record, header=lambda header: header, swap=False, number=None
):
    """Sign a changed file with the key of its owner."""
    frames = list(FrameReader(LEAVES).feed(raw))
    body = lambda kind: b"".join(frame.body for frame in frames if frame.kind is kind)  # noqa: E731
    manifest, old = decode_manifest(body(FrameKind.RECORD)), peek_header(raw)
    payloads, rest = [], memoryview(body(FrameKind.BLOCK))
    for ref in manifest.refs:
        payloads.append(rest[: ref.payload_bytes])
        rest = rest[ref.payload_bytes :]
    if number is not None:  # the last before the tokens: a bias
        last = bytearray(payloads[-1])
        at = len(last) - 4 * manifest.pieces[-1].block.tokens_count
        last[at - 4 : at] = struct.pack("<f", number)
        payloads[-1] = memoryview(bytes(last))
        manifest = _with_checksums(manifest, payloads)
    packed = sealed_unchecked(record(manifest))
    if swap:
        payloads[0] = memoryview(bytes(payloads[0])[::-1])
    forged_header = header(replace(old, record_bytes=len(packed), key_id=key_id(LEAVES)))
    return b"".join(encode_file(forged_header, packed, payloads, LEAVES))


def _first_ref(record, **change):
    first = record.pieces[0]
    piece = replace(first, block=replace(first.block, **change))
    return replace(record, pieces=PieceTable((piece, *record.pieces.items[1:])))


def _with_text(record, text):
    """Make the last token represent the rest of another text."""
    return replace(record, text=text, token_ends=(*record.token_ends[:-1], len(text)))


def _with_state(record):
    last = record.pieces[-1].block
    state = Placed(replace(last, group=CacheGroup.STATE), record.tokens_count)
    return replace(record, states=(state,))


LIES = {
    "a token the model has not": {
        "record": lambda r: replace(r, token_ids=(1 << 31, *r.token_ids[1:]))
    },
    "other tokens": {"record": lambda r: replace(r, token_ids=(5, *r.token_ids[1:]))},
    "another agent": {"record": lambda r: replace(r, agent=AgentId("mallory"))},
    "another epoch": {"record": lambda r: replace(r, epoch=r.epoch + 1)},
    "a group that is none": {"record": lambda r: replace(r, group="../../x")},
    "30 MiB of text for a few tokens": {"record": lambda r: replace(r, text="A" * (30 << 20))},
    "one long token": {"record": lambda r: _with_text(r, "A" * (2 << 20))},
    "zeros after the text": {"record": lambda r: replace(r, text=r.text + "\0" * 64 * 1024)},
    "tokens without text": {"record": lambda r: replace(r, token_ends=(0,) * r.tokens_count)},
    "a far date": {"record": lambda r: replace(r, created_s=1e308)},
    "a date before dates": {"record": lambda r: replace(r, used_s=-1.0)},
    "no date": {"record": lambda r: replace(r, used_s=float("nan"))},
    "a far date of the file": {"header": lambda h: replace(h, created_s=1e308)},
    "a date that is none": {"record": lambda r: replace(r, created_s=float("inf"))},
    "an endless sketch": {"record": lambda r: replace(r, sketch=(1,) * 10_000)},
    "sketch out of range": {"record": lambda r: replace(r, sketch=(-1,))},
    "too large a block": {"record": lambda r: _first_ref(r, payload_bytes=1 << 27)},
    "too small a block": {"record": lambda r: _first_ref(r, payload_bytes=4)},
    "another checksum": {"record": lambda r: _first_ref(r, checksum=bytes(16))},
    "a state the model has not": {"record": _with_state},
    "more blocks": {"header": lambda h: replace(h, blocks_count=h.blocks_count + 1)},
    "other bytes": {"swap": True},
    "fewer bytes": {"header": lambda h: replace(h, payload_bytes=h.payload_bytes - 1)},
    "fewer tokens": {"header": lambda h: replace(h, tokens_count=h.tokens_count - 1)},
    "an infinity": {"number": float("inf")},
    "no number": {"number": float("nan")},
    "another model": {"header": lambda h: replace(h, fingerprint=bytes(32))},
}
