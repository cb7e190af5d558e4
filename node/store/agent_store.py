"""Agents on disk: a turn's new blocks, then its record; lookup of stored prefixes.

Every method blocks on the disk and runs on worker threads. The engine is known here as buffers
only.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fabric.errors import CorruptDataError
from fabric.ids import AgentKey, Fingerprint, TenantId
from fabric.kvcache.block_chain import (
    UNEDITED,
    BlockRef,
    BlockSpan,
    EditLineage,
    block_spans,
    span_ending,
)
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.kvcache.hashing import block_hash, group_hash, tenant_salt
from fabric.limits import BLOCK_TOKENS
from fabric.record.edited_head import Origin
from fabric.record.layout import Held, Layout, NamedHead, layout_of, named_head, unedited_layout
from fabric.record.manifest import Manifest, Placed
from fabric.record.piece_table import Piece
from fabric.record.stored_part import named_blocks, restorable
from fabric.u32s import U32s
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import DiskError

_log = logging.getLogger(__name__)


class BlocksLostError(CorruptDataError):
    """The drive lost blocks of a record while it was being written."""


@dataclass(frozen=True, slots=True)
class ErasedFiles:
    """Files that an erasure removed."""

    blocks_removed: int
    bytes_removed: int
    blocks_kept_shared: int
    bytes_kept_shared: int


@dataclass(frozen=True, slots=True)
class _Doubt:
    """Record that may be stored although its publish failed, with the blocks that it added."""

    record: Manifest
    added: list[BlockRef]


def _same_refs(before: list[BlockRef], after: list[BlockRef]) -> int:
    """Count the leading blocks that a record shares with the record before it."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((i for i, (a, b) in pairs if a is not b), min(len(before), len(after)))


class AgentStore:
    """The warm tier of one node."""

    def __init__(
        self,
        blocks: BlockStore,
        manifests: ManifestStore,
        cluster_key: bytes,
        fingerprint: Fingerprint,
        spec: ModelCacheSpec,
    ) -> None:
        self.blocks = blocks
        self._manifests = manifests
        self._cluster_key = cluster_key
        self._fingerprint = fingerprint
        self.spec = spec
        self._doubtful: dict[AgentKey, list[_Doubt]] = {}

    def recover(self) -> list[Manifest]:
        """Return all records; remove blocks that no record refers to.

        A record may lack blocks; the tokens before the first missing one can still be reused.
        """
        self.blocks.recover()
        manifests = []
        for manifest in self._manifests.load_all():
            self.blocks.retain(manifest.kept_refs)
            manifests.append(manifest)
        self.sweep()
        return manifests

    def forget_stored(self) -> None:
        """Forget what is stored, since the folder is gone; references stay counted."""
        self.blocks.forget_all()
        self._manifests.forget_versions()
        for key in list(self._doubtful):
            self._settle(key)

    def find_again(self) -> list[Manifest]:
        """Index the blocks of a folder that came back; return its records, without erased ones.

        Nothing is swept; `take_in` retains the blocks of the returned records.
        """
        self.blocks.recover()
        return self._manifests.load_all()

    def take_in(self, record: Manifest) -> None:
        """Retain the blocks of a record that was found in a folder that came back."""
        self.blocks.retain(record.kept_refs)

    def version(self, key: AgentKey) -> tuple[int, int]:
        """Return epoch and revision of the stored record, or zeros without one; raise DiskError."""
        return self._manifests.version(key)

    def has_record(self, key: AgentKey) -> bool:
        """Return whether the disk holds, or may hold, a record of an agent; raise DiskError."""
        return any(self.version(key)) or self._manifests.is_doubtful(key)

    def set_aside(self, key: AgentKey, reason: str) -> None:
        """Quarantine an agent's stored record; raise DiskError."""
        self._manifests.set_aside(key, reason)

    # --- names -------------------------------------------------------------------------------

    def spans(
        self,
        tenant: TenantId,
        ids: Sequence[int],
        known: Sequence[BlockSpan] = (),
        same_tokens: int = 0,
        lineage: EditLineage = UNEDITED,
    ) -> tuple[BlockSpan, ...]:
        """Return the blocks of a tenant's tokens; `known` blocks cover the first `same_tokens`."""
        salt, model = self.salt(tenant), self._fingerprint
        return block_spans(salt, model, ids, known, same_tokens, lineage)

    def name_head(self, tenant: TenantId, ids: Sequence[int], layout: Layout) -> NamedHead:
        """Name the blocks of a layout's holes."""
        return named_head(layout, self.salt(tenant), self._fingerprint, ids)

    def layout(self, record: Manifest) -> Layout:
        """Return the layout of a record's cache; raise CorruptDataError for wrong block names."""
        return layout_of(record, self.named_refs(record))

    def layout_to_read(self, record: Manifest) -> Layout:
        """Return the layout of a record for reading all of it.

        Reading a block checks the name of an unedited one. For an edited record, raises
        CorruptDataError here if block names are wrong.
        """
        return unedited_layout(record) if record.edited is None else self.layout(record)

    def salt(self, tenant: TenantId) -> bytes:
        """Return the key of a tenant's block names."""
        return tenant_salt(self._cluster_key, tenant)

    def span_ending(
        self, tenant: TenantId, ids: Sequence[int], spans: Sequence[BlockSpan], end: int
    ) -> BlockSpan:
        """Return the block of `ids` that ends at token `end`, a shortened one if necessary."""
        return span_ending(self.salt(tenant), self._fingerprint, ids, spans, end)

    def state_span(
        self, tenant: TenantId, ids: Sequence[int], spans: Sequence[BlockSpan], end: int
    ) -> BlockSpan:
        """Return the block of the recurrent state after the first `end` tokens of `ids`."""
        span = self.span_ending(tenant, ids, spans, end)
        return span.in_group(self.salt(tenant), CacheGroup.STATE)

    def named_refs(self, record: Manifest) -> list[tuple[BlockRef, BlockSpan]]:
        """Pair every block of a record with its span; raise CorruptDataError for wrong names.

        Names are recomputed from the tokens under this cluster's key, never taken from the record.
        """
        named = named_blocks(record, self.salt(record.tenant))
        is_whole = len(named) == len(record.refs) and record.fingerprint == self._fingerprint
        if not is_whole or not all(span.names(ref) for ref, span in named):
            message = "the record's block names do not follow from its tokens"
            raise CorruptDataError(message)
        return named

    def is_named(
        self,
        tenant: TenantId,
        ref: BlockRef,
        origin: Origin,
        group: CacheGroup = CacheGroup.FULL,
    ) -> bool:
        """Return whether a block's name follows from its tokens and its parent."""
        salt = self.salt(tenant)
        chain = block_hash(salt, self._fingerprint, origin.parent, origin.tokens)
        return ref.group is group and ref.block_hash == group_hash(salt, chain, group)

    # --- read --------------------------------------------------------------------------------

    def shared_prefix(self, tenant: TenantId, ids: Sequence[int]) -> Layout:
        """Return the layout of stored full blocks with which `ids` begin, from any conversation."""
        salt, groups = self.salt(tenant), self.spec.groups
        parts: list[Held] = []
        states: list[Placed] = []

        def find(span: BlockSpan, group: CacheGroup) -> BlockRef | None:
            if group not in groups:
                return None
            return self.blocks.find(span.in_group(salt, group).block_hash)

        for span in self.spans(tenant, ids):
            ref = self.blocks.find(span.block_hash) if span.is_full else None
            if ref is None or ref.tokens_count != BLOCK_TOKENS:
                break
            origin = Origin(span.parent, U32s(ids[span.start : span.end]))
            window, state = find(span, CacheGroup.WINDOW), find(span, CacheGroup.STATE)
            parts.append(Held(Piece(ref, 0, ref.tokens_count), origin, window=window))
            if state is not None:
                states.append(Placed(state, span.end))
        return Layout(tuple(parts), states=tuple(states))

    def restorable(self, layout: Layout) -> Layout:
        """Return as much of a layout as its stored windows and states allow to restore."""
        has_states = CacheGroup.STATE in self.spec.groups
        return restorable(layout, self.spec.window_tokens, has_states=has_states)

    # --- write -------------------------------------------------------------------------------

    def save_block(self, span: BlockSpan, ids: Sequence[int], kv: memoryview) -> BlockRef:
        """Publish one block's bytes; a no-op if this very block is stored."""
        tokens = ids[span.start : span.end]
        return self.blocks.put(span.parent, span.block_hash, tokens, [kv], span.group)

    def publish(self, manifest: Manifest, previous: Manifest | None) -> None:
        """Make `manifest` the agent's record: the commit point of a turn.

        Raises BlocksLostError or DiskError. After a failure `previous` is stored, or no record if
        there was none. Only after a DiskError with code UNDECIDED may a restart find either one.
        """
        before = previous.kept_refs if previous is not None else []
        refs = manifest.kept_refs
        same = _same_refs(before, refs)
        added, removed = refs[same:], before[same:]
        lost_refs = {*self.blocks.retain(added), *self.blocks.missing(refs[:same])}
        if lost_refs:  # branches may lack blocks
            lost_refs.intersection_update(manifest.refs)
        if lost_refs:  # since the lookup, another agent's turn has swept them
            self.blocks.release(added)
            message = f"{len(lost_refs)} blocks of the record are no longer stored"
            raise BlocksLostError(message)
        try:
            self._manifests.publish(manifest, previous)
        except BaseException as error:
            if isinstance(error, DiskError) and error.is_in_place:
                self._note_doubt(manifest, added)
            else:
                self.blocks.release(added)
                self._settle_unless_doubtful(manifest.key)
            raise
        self._settle(manifest.key)
        if previous is not None:
            self.blocks.release(removed)
        self.sweep()  # also removes blocks of a removed record that a first turn has read

    def doubtful_record(self, key: AgentKey) -> Manifest | None:
        """Return the newest record that a restart may find although its publish failed, if any."""
        doubts = self._doubtful.get(key)
        return doubts[-1].record if doubts else None

    def settle(self, key: AgentKey) -> bool:
        """Write back the record before a failed publish; return whether none is doubtful now."""
        self._manifests.settle(key)
        return self._settle_unless_doubtful(key)

    def settle_all(self) -> int:
        """Settle all doubtful records; return the number of agents that are still doubtful."""
        return sum(not self.settle(key) for key in list(self._doubtful))

    def _note_doubt(self, record: Manifest, added: list[BlockRef]) -> None:
        """Keep the new blocks of a record that is on disk but may be lost in a power cut."""
        doubts = self._doubtful.setdefault(record.key, [])
        if doubts and doubts[-1].added == added:
            self.blocks.release(added)  # a repeated attempt: these blocks are already retained
            doubts.pop()
        doubts.append(_Doubt(record, added))

    def _settle_unless_doubtful(self, key: AgentKey) -> bool:
        is_sure = not self._manifests.is_doubtful(key)
        if is_sure:
            self._settle(key)
        return is_sure

    def _settle(self, key: AgentKey) -> None:
        """Release the blocks of records that a restart can no longer find."""
        for doubt in self._doubtful.pop(key, ()):
            self.blocks.release(doubt.added)

    def sweep(self) -> None:
        """Remove unreferenced blocks; retry in a later sweep those that the disk cannot remove."""
        try:
            self.blocks.sweep()
        except DiskError as error:
            _log.error("cannot remove unreferenced blocks yet: %s", error.message)

    def erase_record(self, key: AgentKey, saved: Manifest | None) -> list[BlockRef]:
        """Remove an agent's record, and any doubtful one; return their blocks.

        Blocks whose files are gone are not listed. `saved` is the record that is known to be
        stored. Releases no block if it raises DiskError.
        """
        refs = [ref for doubt in self._doubtful.get(key, ()) for ref in doubt.added]
        refs += saved.kept_refs if saved is not None else ()
        refs = [ref for ref in dict.fromkeys(refs) if self.blocks.is_stored(ref)]
        self._manifests.remove(key)
        self._settle(key)
        if saved is not None:
            self.blocks.release(saved.kept_refs)
        return refs

    def erase_unknown(self, key: AgentKey | None = None) -> int:
        """Remove erased records of agents that are not in the table; return how many."""
        if key is None:
            return self._manifests.remove_erased()
        removed = self._manifests.remove_erased([self._manifests.digest(key)])
        if removed:
            self._settle(key)
        return removed

    def erase_blocks(self, refs: Iterable[BlockRef]) -> ErasedFiles:
        """Remove the blocks that only erased records referred to; raise DiskError."""
        refs = list(dict.fromkeys(refs))
        self.blocks.sweep()
        kept = {ref for ref in refs if self.blocks.has(ref)}
        return ErasedFiles(
            blocks_removed=len(refs) - len(kept),
            bytes_removed=sum(ref.payload_bytes for ref in refs if ref not in kept),
            blocks_kept_shared=len(kept),
            bytes_kept_shared=sum(ref.payload_bytes for ref in kept),
        )

    def erase_quarantined(self, key: AgentKey) -> bool:
        """Empty the quarantine, since its blocks have no known owner.

        Returns whether it contained a record of this agent.
        """
        lead = f"{self._manifests.digest(key)}.mf"
        self.blocks.remove_leftovers()
        return any(leaf.startswith(lead) for leaf in self.blocks.empty_quarantine())

    def erase_all_quarantined(self, *, is_sure: bool) -> None:
        """Empty the quarantine if it contains a record of an erased agent, or if `is_sure`."""
        self.blocks.remove_leftovers()
        if is_sure or any(map(self._manifests.is_named, self.blocks.quarantined())):
            self.blocks.empty_quarantine()

    def evict(self, manifests: Sequence[Manifest]) -> None:
        """Remove agents' records and all blocks that become unreferenced; raise DiskError."""
        self._manifests.remove_all(record.key for record in manifests)
        for record in manifests:
            self._settle(record.key)
            self.blocks.release(record.kept_refs)
        self.sweep()

    def missing(self, manifest: Manifest) -> list[BlockRef]:
        return self.blocks.missing(dict.fromkeys(manifest.refs))
