"""A sample of everything that is stored on disk or signed, with every field set."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fabric.codec import pack, unpack
from fabric.ids import (
    AgentId,
    BlockHash,
    Checksum,
    Fingerprint,
    MigrationId,
    NodeName,
    TenantId,
)
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.block_file import render_block_header
from fabric.kvcache.cache_spec import (
    CacheGroup,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    SlotSpec,
    TensorSpec,
)
from fabric.kvcache.rotation import Rotation
from fabric.net.handshake import HandshakeRole, prove
from fabric.net.ticket import Ticket, issue_ticket, open_ticket
from fabric.net.wire import Hello
from fabric.record.answers import CallWritten, OmittedParts, encode_answers
from fabric.record.hibernation_file import HibernationHeader, SignedWith
from fabric.record.manifest import (
    Manifest,
    OwnerState,
    Placed,
    decode_manifest,
    encode_manifest,
)
from fabric.record.piece_table import Piece, PieceTable
from fabric.record.provenance import LastServed, Provenance
from fabric.record.spec_file import SpecRecord, decode_spec, encode_spec
from fabric.record.tombstone import Tombstone, decode_tombstone, encode_tombstone
from fabric.u32s import U32s
from node.store.service_time import Served
from router.fleet.node_roster import NodeRoster, SeenNode, decode_roster, encode_roster

KEY = bytes(range(32))
PRINT = Fingerprint(b"f" * 32)
# Numerics tag of the first stores; any text would do.
NUMERICS = '{"mlx": "0.32.4", "mlx_lm": "0.32.2", "ours": 1, "backend": "cpu-linux"}'
TENANT, AGENT = TenantId("default"), AgentId("mira")


def _ref(letter: bytes, tokens_count: int, group: CacheGroup) -> BlockRef:
    return BlockRef(
        BlockHash(letter * 32), Checksum(letter * 16), tokens_count, 1_000 + tokens_count, group
    )


def _rotation(base: float | None, frequencies: tuple[float, ...] | None) -> Rotation:
    return Rotation("keys", 0, 4, True, base, 0.5, frequencies)


SPEC = ModelCacheSpec(
    layers=(
        LayerSpec(
            LayerKind.FULL,
            slots=(
                SlotSpec("keys", 2, 64, 4, 64, "BF16"),
                SlotSpec("values", 2, 80, 8, 32, "F16"),
            ),
            has_sinks=True,
            rotations=(_rotation(10_000.0, None),),
        ),
        LayerSpec(
            LayerKind.WINDOW,
            slots=(SlotSpec("keys", 1, 32, 0, 0, "F32"),),
            window_tokens=32,
            is_chunked=True,
            rotations=(_rotation(None, (1.0, 0.0)),),
        ),
        LayerSpec(
            LayerKind.LATENT,
            slots=(SlotSpec("keys", 1, 64, 0, 0, "F16"),),
            rotations_unknown="a reason",
        ),
        LayerSpec(LayerKind.INDEXED, slots=(SlotSpec("index", 1, 64, 0, 0, "F16"),)),
        LayerSpec(LayerKind.RECURRENT, states=(TensorSpec("state.0", "F32", (1, 4, 8)),)),
    ),
    nesting=(0, 2, 0, 0),
    sharing_count=1,
)
MANIFEST = Manifest(
    tenant=TENANT,
    agent=AGENT,
    fingerprint=PRINT,
    owner=NodeName("node-a"),
    epoch=2,
    revision=3,
    state=OwnerState.SEALED,
    text="größe",
    token_ids=U32s((1, 2, 70_000)),
    token_ends=U32s((1, 4, 7)),
    prompt_tokens_count=2,
    pieces=PieceTable(
        (
            Piece(_ref(b"a", 2, CacheGroup.FULL), 0, 2),
            Piece(_ref(b"b", 3, CacheGroup.FULL), 1, 2, delta=-1),
        )
    ),
    windows=(Placed(_ref(b"c", 3, CacheGroup.WINDOW), 3),),
    states=(Placed(_ref(b"d", 3, CacheGroup.STATE), 3),),
    group="a-user",
    sketch=(5, 1 << 40),
    created_s=1_700_000_000.5,
    used_s=1_700_000_001.0,
    migration=MigrationId("migration-1"),
    sealed_to=NodeName("node-b"),
    pinned=True,
    provenance=Provenance(served=LastServed(NodeName("node-a"), 17)),
)
ANSWERS = encode_answers({7: OmittedParts("Hm.", "\n", " ", (CallWritten('{"a":1}', "call_1"),))})
ANSWERED = replace(MANIFEST, provenance=Provenance(answers=ANSWERS))
TOMBSTONE = Tombstone("0a" * 16, "0b" * 16, 7, 1_700_000_000.5)
HEADER = HibernationHeader(
    signed_with=SignedWith.KEY,
    key_id=b"k" * 8,
    salt=b"salt",
    tenant=TenantId(""),
    agent=AGENT,
    fingerprint=PRINT,
    model="recall",
    epoch=2,
    revision=3,
    tokens_count=4,
    blocks_count=5,
    record_bytes=6,
    payload_bytes=7,
    created_s=1_700_000_000.5,
)
TICKET = Ticket(
    migration=MigrationId("migration-1"),
    tenant=TENANT,
    agent=AGENT,
    source=NodeName("node-a"),
    target=NodeName("node-b"),
    epoch=2,
    blocks_digest=b"d" * 32,
    nonce=b"n" * 16,
)
SERVED = Served(17.5, {"66" * 8: 3.0})
HELLO = Hello(NodeName("node-b"), NodeName("node-a"), PRINT, b"n" * 32, encrypts=True)
ROSTER = NodeRoster(
    configured=3,
    nodes=(
        SeenNode(NodeName("node-a"), 1_790_000_000),
        SeenNode(NodeName("node-b"), 7, is_drained=True),
    ),
    lives=5,
)
RECORD = SpecRecord(PRINT, "recall", SPEC)

# By name: the sample, its encoder, and its decoder.
CODED: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "manifest": (MANIFEST, encode_manifest, decode_manifest),
    "manifest with answers": (ANSWERED, encode_manifest, decode_manifest),
    "spec": (RECORD, encode_spec, decode_spec),
    "tombstone": (TOMBSTONE, encode_tombstone, decode_tombstone),
    "hibernation header": (HEADER, pack, lambda raw: unpack(HibernationHeader, raw)),
    "ticket": (
        TICKET,
        lambda ticket: issue_ticket(KEY, ticket),
        lambda raw: open_ticket(KEY, raw),
    ),
    "served": (SERVED, pack, lambda raw: unpack(Served, raw)),
    "roster": (ROSTER, encode_roster, decode_roster),
}


def block_headers() -> dict[str, bytes]:
    """Render a header of each group, without the spaces that fill it."""
    return {
        f"block header {group}": render_block_header(
            SPEC, PRINT, BlockHash(bytes(32)), BlockHash(b"h" * 32), 3, group
        ).rstrip(b" ")
        for group in CacheGroup
    }


def handshake_proof() -> bytes:
    """Compute the key's proof: a digest over the bytes of a whole transcript."""
    return prove(KEY, HandshakeRole.CLIENT, HELLO, b"s" * 32, encrypts=True)
