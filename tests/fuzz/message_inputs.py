"""Received data as fuzz inputs: frames, tickets, calls, settings and compressed slices."""

import random
import struct

import msgpack

from fabric import PROTOCOL_VERSION
from fabric.codec import pack, parse_json, to_plain
from fabric.control.calls import CALLS, NamedMessage, encode_call
from fabric.control.change_calls import COLUMNS, DescribeChanges, ListChanges
from fabric.control.directive_calls import DirectAgent
from fabric.control.erasure_calls import EraseAgent
from fabric.control.node_calls import CommitMigration, Describe, Flush, Offer, PrefetchAgent
from fabric.control.replica_calls import KeepFork
from fabric.ids import AgentId, Fingerprint, MigrationId, NodeName, OperationId, TenantId
from fabric.net.compression import compress_slice, decompress_slice
from fabric.net.ticket import Ticket, _sign
from fabric.net.wire import (
    _KINDS,
    HEAD_BYTES,
    Challenge,
    FetchPart,
    FetchRequest,
    Goodbye,
    Hello,
    PayloadCodec,
    PayloadHead,
    Proof,
    Refusal,
    decode_body,
    decode_head,
    encode_frame,
)
from fabric.settings import FabricSettings
from tests.fuzz.edited_inputs import DIRECTIVES
from tests.fuzz.file_inputs import rebuilt_msgpack
from tests.fuzz.mutation import mutate_tree, spell_json, spell_msgpack
from tests.support.blocks import (
    CLUSTER_KEY,
)

Rng = random.Random


# --- the wire ------------------------------------------------------------------------------------

ALL_KINDS = tuple(kind for kind, _ in _KINDS.values())


def parse_frame(raw: bytes) -> object:
    return decode_body(decode_head(raw[:HEAD_BYTES], ALL_KINDS), raw[HEAD_BYTES:])


def frame_seeds() -> list[bytes]:
    part = FetchPart(b"h" * 32, b"c" * 16, 5, 9)
    return [
        encode_frame(message)
        for message in (
            Hello(NodeName("mac-b"), NodeName("mac-a"), Fingerprint(b"f" * 32), b"n" * 32),
            Challenge(b"n" * 32, b"p" * 32),
            Proof(b"p" * 32),
            FetchRequest(b"ticket", (part, part), 10),
            PayloadHead(0, 0, 100, 100),
            PayloadHead(1, 5, 100, 10, PayloadCodec.ZSTD),
            Refusal("not_found", "no such block"),
            Goodbye(),
        )
    ]


def rebuilt_frame(rng: Rng, seed: bytes) -> bytes:
    number = seed[3] if rng.random() < 0.9 else rng.randrange(10)
    body = rebuilt_msgpack(rng, seed[HEAD_BYTES:])
    return struct.pack(">2sBBI", b"mf", PROTOCOL_VERSION, number, len(body)) + body


TICKET = Ticket(
    MigrationId("migration-1"),
    TenantId("default"),
    AgentId("alice"),
    NodeName("mac-a"),
    NodeName("mac-b"),
    3,
    b"d" * 32,
    b"n" * 16,
)


def rebuilt_ticket(rng: Rng, seed: bytes) -> bytes:
    body = rebuilt_msgpack(rng, seed[32:])
    return _sign(CLUSTER_KEY, body) + body


# --- control, settings, compression --------------------------------------------------------------


def call_seeds() -> list[bytes]:
    migration, offer = MigrationId("migration-1"), Offer(b"manifest", b"ticket", ())
    return [
        encode_call(call)
        for call in (
            Describe(),
            DescribeChanges(7, 3, 5),
            ListChanges(7, 3, COLUMNS),
            EraseAgent(TenantId("default"), AgentId("alice"), 7, OperationId("operation"), 1.0),
            Flush(drop_hot=True),
            CommitMigration(migration, NodeName("node-a"), offer, 4),
            KeepFork(migration, b"manifest", OperationId("operation"), AgentId("bob"), 1),
            PrefetchAgent(TenantId("default"), AgentId("alice"), 3, cancel=True),
            DirectAgent(TenantId("default"), AgentId("alice"), DIRECTIVES),
        )
    ]


def rebuilt_call(rng: Rng, seed: bytes) -> bytes:
    tree = msgpack.unpackb(seed)
    if rng.random() < 0.7:
        name = tree["name"] if rng.random() < 0.9 else rng.choice(sorted(CALLS))
        return pack(NamedMessage(name, rebuilt_msgpack(rng, tree["body"])))
    return spell_msgpack(rng, mutate_tree(rng, tree))


def settings_seeds() -> list[bytes]:
    whole = to_plain(FabricSettings(local_nodes=("node-a",)))
    keyed = {"router": {"api_keys": {"family": "at-least-sixteen-characters"}}}
    rng = Rng(0)
    return [spell_json(rng, tree) for tree in (whole, keyed, {})]


def rebuilt_json(rng: Rng, seed: bytes) -> bytes:
    return spell_json(rng, mutate_tree(rng, parse_json(seed)))


SLICE_BYTES = 3_000


def decompress(raw: bytes) -> object:
    """Decompress into a part of a buffer whose other bytes must stay as they are."""
    buffer = bytearray(b"\xaa" * (SLICE_BYTES + 64))
    try:
        decompress_slice(raw, memoryview(buffer)[:SLICE_BYTES])
    finally:
        assert buffer[SLICE_BYTES:] == b"\xaa" * 64
    return bytes(buffer[:SLICE_BYTES])


def slice_seeds() -> list[bytes]:
    rng = Rng(5)
    texts = [rng.randbytes(SLICE_BYTES), bytes(SLICE_BYTES), bytes(rng.choices(b"abc", k=3_000))]
    return [compress_slice(text) for text in texts]


def rebuilt_slice(rng: Rng, seed: bytes) -> bytes:
    """Return frames of other lengths, several frames, skippable ones, and windows of any size."""
    chance = rng.random()
    if chance < 0.3:
        size = rng.choice((0, 1, SLICE_BYTES - 1, SLICE_BYTES + 1, 1 << 16, 1 << 20))
        return compress_slice(bytes(size))
    if chance < 0.5:
        return seed + rng.choice((seed, b"\x50\x2a\x4d\x18\x01\0\0\0x", b"\0"))
    out = bytearray(seed)
    out[rng.randrange(4, 12)] = rng.randrange(256)
    return bytes(out)
