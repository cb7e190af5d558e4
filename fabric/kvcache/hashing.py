"""Identity and integrity: keyed block hashes, tenant salts, payload checksums.

BLAKE2b decides identity, since only digests are compared; xxh3 only detects damage.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from xxhash import xxh3_128

from fabric.ids import (
    AgentId,
    BlockHash,
    Checksum,
    Fingerprint,
    TenantId,
)
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from fabric.u32s import U32s

ROOT_PARENT = BlockHash(bytes(32))
LINEAGE_BYTES = 32


def tenant_salt(cluster_key: bytes, tenant: TenantId) -> bytes:
    """Derive the 32-byte key under which all of one tenant's blocks are hashed."""
    return blake2b(tenant.encode(), digest_size=32, key=cluster_key, person=b"mf-tenant").digest()


def agent_digest(cluster_key: bytes, tenant: TenantId, agent: AgentId) -> str:
    """Return the keyed digest, 32 hex digits, that names an agent's files and hides its id."""
    name = f"{len(tenant)}:{tenant}{agent}".encode()
    return blake2b(name, digest_size=16, key=cluster_key, person=b"mf-agent").hexdigest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32."""
    return (tokens if isinstance(tokens, U32s) else U32s(tokens)).pack()


def block_hash(
    salt: bytes, fingerprint: Fingerprint, parent: BlockHash, tokens: Sequence[int]
) -> BlockHash:
    """Hash one block of up to 256 tokens, chained to `parent`, for one tenant and model."""
    assert 0 < len(tokens) <= BLOCK_TOKENS, "a block holds 1-256 tokens"
    digest = blake2b(digest_size=32, key=salt, person=b"mf-block-v1")
    digest.update(parent)
    digest.update(fingerprint)
    digest.update(len(tokens).to_bytes(4, "little"))
    digest.update(token_bytes(tokens))
    return BlockHash(digest.digest())


def edited_parent(salt: bytes, parent: BlockHash, lineage: bytes) -> BlockHash:
    """Return the parent of a block after edits, which differs from any unedited block's."""
    assert len(lineage) == LINEAGE_BYTES, "a lineage is a digest"
    digest = blake2b(parent + lineage, digest_size=32, key=salt, person=b"mf-edited-v1")
    return BlockHash(digest.digest())


def group_hash(salt: bytes, chain: BlockHash, group: CacheGroup) -> BlockHash:
    """Return the name of another group's block for the same tokens as the block `chain`."""
    if group is CacheGroup.FULL:
        return chain
    person = f"mf-{group.value}".encode()
    return BlockHash(blake2b(chain, digest_size=32, key=salt, person=person).digest())


class PayloadHash:
    """Running checksum of a payload that arrives in parts."""

    def __init__(self) -> None:
        self._digest = xxh3_128()
        self.hashed_bytes = 0

    def update(self, part: bytes | bytearray | memoryview) -> None:
        """Add the payload's next bytes, in file order."""
        self._digest.update(part)
        self.hashed_bytes += len(part)

    def checksum(self) -> Checksum:
        """Return the checksum of all bytes so far."""
        return Checksum(self._digest.digest())


def payload_checksum(parts: Iterable[bytes | bytearray | memoryview]) -> Checksum:
    """Checksum a block's payload given as consecutive buffers in file order."""
    payload = PayloadHash()
    for part in parts:
        payload.update(part)
    return payload.checksum()
