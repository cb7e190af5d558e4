"""Agents on disk: save a turn's new blocks and then its record, load a prefix back.

Every method blocks on the disk and runs on worker threads; nothing here knows the engine
except as buffers.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fabric.block import BlockRef
from fabric.block_chain import BlockSpan, block_spans
from fabric.errors import CorruptDataError
from fabric.hashing import tenant_salt
from fabric.ids import Fingerprint, TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.manifest import Manifest, Piece
from node.block_store import BlockStore
from node.manifest_store import ManifestStore
from node.mlx.resident_cache import ResidentCache

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure removed."""

    blocks_removed: int
    bytes_removed: int
    blocks_kept_shared: int


class AgentStore:
    """The warm tier of one node."""

    def __init__(
        self,
        blocks: BlockStore,
        manifests: ManifestStore,
        cluster_key: bytes,
        fingerprint: Fingerprint,
    ) -> None:
        self.blocks = blocks
        self._manifests = manifests
        self._cluster_key = cluster_key
        self._fingerprint = fingerprint

    def recover(self) -> list[Manifest]:
        """Return all records; remove blocks that none refers to.

        A record may lack blocks: what comes before the first missing one still serves.
        """
        self.blocks.recover()
        kept = []
        for manifest in self._manifests.load_all():
            self.blocks.retain(_refs(manifest))
            kept.append(manifest)
        self.blocks.sweep()
        return kept

    def spans(self, tenant: TenantId, ids: Sequence[int]) -> tuple[BlockSpan, ...]:
        """Cut a tenant's tokens into named blocks."""
        return block_spans(tenant_salt(self._cluster_key, tenant), self._fingerprint, ids)

    def shared_prefix(self, tenant: TenantId, ids: Sequence[int]) -> list[Piece]:
        """List stored full blocks of any conversation of `tenant` that begin `ids`."""
        pieces = []
        for span in self.spans(tenant, ids):
            ref = self.blocks.find(span.block_hash) if span.is_full else None
            if ref is None:
                break
            pieces.append(Piece(ref, 0, BLOCK_TOKENS))
        return pieces

    def load(
        self, tenant: TenantId, ids: Sequence[int], pieces: Sequence[Piece], cache: ResidentCache
    ) -> int:
        """Read pieces straight into `cache`; return how many leading tokens are good.

        `ids` are the tokens the pieces claim to hold. A block that is missing or fails any
        check ends the prefix there.
        """
        loaded = 0
        for span, piece in zip(self.spans(tenant, ids), pieces, strict=False):
            if (span.end - span.start, piece.start, piece.delta) != (piece.end, 0, 0):
                break
            if piece.block.block_hash != span.block_hash:
                break
            views = cache.scatter_views(span.start, span.end)
            try:
                self.blocks.load_into(piece.block, span.parent, ids[span.start : span.end], views)
            except CorruptDataError as error:
                _log.warning("block at token %d is a miss: %s", span.start, error.message)
                break
            loaded = span.end
        return loaded

    def save_block(self, span: BlockSpan, ids: Sequence[int], kv: memoryview) -> BlockRef:
        """Publish one block's bytes; a no-op if this very block is stored."""
        return self.blocks.put(span.parent, span.block_hash, ids[span.start : span.end], [kv])

    def publish(self, manifest: Manifest, previous: Manifest | None) -> None:
        """Make `manifest` the agent's record: the commit point of a turn."""
        gone = self.blocks.retain(_refs(manifest))
        if gone:  # erased by another agent's turn since they were found
            self.blocks.release(_refs(manifest))
            message = f"{len(gone)} blocks of the record are not stored any more"
            raise CorruptDataError(message)
        try:
            self._manifests.publish(manifest)
        except BaseException:
            self.blocks.release(_refs(manifest))
            raise
        if previous is not None:
            self.blocks.release(_refs(previous))
            self.blocks.sweep()

    def erase(self, manifest: Manifest) -> Erased:
        """Remove an agent's record and every block nobody else refers to."""
        refs = list(dict.fromkeys(_refs(manifest)))
        self._manifests.remove(manifest.tenant, manifest.agent)
        self.blocks.release(_refs(manifest))
        self.blocks.sweep()
        removed = [ref for ref in refs if not self.blocks.has(ref)]
        return Erased(
            blocks_removed=len(removed),
            bytes_removed=sum(ref.payload_bytes for ref in removed),
            blocks_kept_shared=len(refs) - len(removed),
        )

    def missing(self, manifest: Manifest) -> list[BlockRef]:
        """List the record's blocks that are not stored here."""
        return [ref for ref in dict.fromkeys(_refs(manifest)) if not self.blocks.has(ref)]


def _refs(manifest: Manifest) -> list[BlockRef]:
    return [piece.block for piece in manifest.pieces]


def with_blocks(manifest: Manifest, refs: Sequence[BlockRef]) -> Manifest:
    """Return the record with its tokens held by `refs`, one whole block each."""
    return replace(manifest, pieces=tuple(Piece(ref, 0, ref.tokens_count) for ref in refs))
