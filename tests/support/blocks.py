"""Small blocks and records with the right shape and arbitrary contents."""

import random
from dataclasses import dataclass

from fabric.codec import pack
from fabric.ids import AgentId, BlockHash, Fingerprint, NodeName, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.block_file import payload_bytes
from fabric.kvcache.cache_spec import (
    CacheGroup,
    LayerKind,
    LayerSpec,
    ModelCacheSpec,
    TensorSpec,
)
from fabric.kvcache.hashing import (
    ROOT_PARENT,
    block_hash,
    group_hash,
    payload_checksum,
    tenant_salt,
    token_bytes,
)
from fabric.record.manifest import MAGIC, Manifest, OwnerState
from fabric.record.piece_table import PieceTable
from node.store.block_store import BlockStore
from tests.support.layers import attention_layer

CLUSTER_KEY = bytes(range(32))
FINGERPRINT = Fingerprint(b"f" * 32)
TENANT = TenantId("default")
AGENT = AgentId("alice")
SALT = tenant_salt(CLUSTER_KEY, TENANT)


def make_spec(layers: int = 1, heads: int = 1, width: int = 64, dtype: str = "F16"):
    layer = attention_layer(
        LayerKind.FULL, heads, (width, width), bits=4, group_size=64, dtype=dtype
    )
    return ModelCacheSpec((layer,) * layers)


def make_mixed_spec() -> ModelCacheSpec:
    """Describe a model with a layer of each group."""
    sizes = {"bits": 4, "group_size": 64, "dtype": "F16"}
    state = (TensorSpec("state.0", "F32", (1, 4, 8)), TensorSpec("state.1", "F32", (1, 3)))
    return ModelCacheSpec(
        (
            attention_layer(LayerKind.FULL, 1, (64, 64), **sizes),
            attention_layer(LayerKind.WINDOW, 1, (64, 64), window_tokens=32, **sizes),
            LayerSpec(LayerKind.RECURRENT, states=state),
        )
    )


SPEC = make_spec()
MIXED = make_mixed_spec()


@dataclass(frozen=True)
class Block:
    """Contents and name of one block."""

    parent: BlockHash
    tokens: tuple[int, ...]
    kv: bytes
    ref: BlockRef

    @property
    def payload(self) -> bytes:
        return self.kv + token_bytes(self.tokens)

    def put_into(self, store: BlockStore) -> BlockRef:
        kv = [memoryview(self.kv)]
        return store.put(self.parent, self.ref.block_hash, self.tokens, kv, self.ref.group)

    def adopt_into(self, store: BlockStore) -> None:
        store.adopt(self.ref, self.parent, self.tokens, memoryview(self.payload))

    def load_from(self, store: BlockStore) -> bytes:
        """Load through uneven buffers and return what arrived."""
        resident = bytearray(b"\xaa" * len(self.kv))
        third = len(self.kv) // 3
        view = memoryview(resident)
        store.load_into(self.ref, self.parent, self.tokens, [view[:third], view[third:]])
        return bytes(resident)


def make_block(
    seed: int, tokens_count: int = 2, spec=SPEC, parent=ROOT_PARENT, group=CacheGroup.FULL
) -> Block:
    rng = random.Random(seed)
    tokens = tuple(rng.randrange(1 << 16) for _ in range(tokens_count))
    return with_kv(tokens, rng.randbytes(spec.kv_bytes(tokens_count, group)), spec, parent, group)


def with_kv(
    tokens: tuple[int, ...], kv: bytes, spec=SPEC, parent=ROOT_PARENT, group=CacheGroup.FULL
) -> Block:
    ref = BlockRef(
        group_hash(SALT, block_hash(SALT, FINGERPRINT, parent, tokens), group),
        payload_checksum([kv, token_bytes(tokens)]),
        len(tokens),
        payload_bytes(spec, len(tokens), group),
        group,
    )
    return Block(parent, tokens, kv, ref)


def make_manifest(blocks: list[Block], revision: int = 1, epoch: int = 1, agent=AGENT) -> Manifest:
    """Record an agent whose memory is `blocks`."""
    tokens = tuple(token for block in blocks for token in block.tokens)
    return Manifest(
        tenant=TENANT,
        agent=agent,
        fingerprint=FINGERPRINT,
        owner=NodeName("node-a"),
        epoch=epoch,
        revision=revision,
        state=OwnerState.OWNED,
        text="x" * len(tokens),
        token_ids=tokens,
        token_ends=tuple(range(1, len(tokens) + 1)),
        prompt_tokens_count=len(tokens),
        pieces=PieceTable().append(block.ref for block in blocks),
    )


def refs_of(manifest: Manifest) -> list[BlockRef]:
    return manifest.pieces.blocks


def sealed_unchecked(record: Manifest) -> bytes:
    """Serialize a record as `encode_manifest` does, without its checks."""
    body = pack(record)
    return MAGIC + payload_checksum([body]) + body
