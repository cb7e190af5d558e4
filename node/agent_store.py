"""Agents on disk: save a turn's new blocks and then its record, load a prefix back.

Every method blocks on the disk and runs on worker threads; nothing here knows the engine
except as buffers.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from fabric.block import BlockRef
from fabric.block_chain import BlockSpan, block_spans, span_ending
from fabric.cache_spec import CacheGroup, ModelCacheSpec
from fabric.errors import CorruptDataError
from fabric.hashing import tenant_salt
from fabric.ids import AgentId, Fingerprint, TenantId
from fabric.limits import AGENT_TOKENS_MAX, BLOCK_TOKENS
from fabric.manifest import Manifest
from fabric.restore_plan import Stored, restore_point, window_blocks
from node.block_store import BlockMissingError, BlockStore
from node.manifest_store import ManifestStore
from node.mlx.resident_cache import ResidentCache
from node.posix_disk import DiskError
from node.staging import Place

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure removed."""

    blocks_removed: int
    bytes_removed: int
    blocks_kept_shared: int
    bytes_kept_shared: int


@dataclass(slots=True)
class Stock:
    """The stored blocks of one context; what fails to load is taken out."""

    full: list[BlockRef] = field(default_factory=list)
    windows: dict[int, BlockRef] = field(default_factory=dict)  # by first token
    states: dict[int, BlockRef] = field(default_factory=dict)  # by the token behind the last

    def stored(self, tokens_count: int) -> Stored:
        """Say what there is of a context of `tokens_count` tokens."""
        covered = sum(ref.tokens_count for ref in self.full)
        ends = {start: start + ref.tokens_count for start, ref in self.windows.items()}
        return Stored(min(covered, tokens_count), ends, self.states.keys())

    def refs(self) -> list[BlockRef]:
        """List every block."""
        return [*self.full, *self.windows.values(), *self.states.values()]


def stock_of(record: Manifest | None, tokens_max: int = AGENT_TOKENS_MAX) -> Stock:
    """List the blocks of a record's first tokens, as far as they can be used as they are."""
    stock = Stock()
    if record is None:
        return stock
    end = 0
    for piece in record.pieces:
        end += piece.end - piece.start
        is_whole = (piece.start, piece.end, piece.delta) == (0, piece.block.tokens_count, 0)
        if not is_whole or end > tokens_max:
            break
        stock.full.append(piece.block)
    stock.windows = {p.start: p.block for p in record.windows if p.end <= tokens_max}
    stock.states = {p.end: p.block for p in record.states if p.end <= tokens_max}
    return stock


def _same_refs(before: list[BlockRef], after: list[BlockRef]) -> int:
    """Count the leading blocks that a record has from the one before it."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((i for i, (a, b) in pairs if a is not b), min(len(before), len(after)))


def tokens_in_common(record: Manifest | None, stock: Stock, tokens_max: int) -> int:
    """Count the leading tokens that a record and a stock have in the very same full blocks."""
    end = 0
    for ours, theirs in zip(stock_of(record, tokens_max).full, stock.full, strict=False):
        if ours != theirs:
            break
        end += ours.tokens_count
    return end


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
        self._spec = spec
        self._doubtful: dict[tuple[TenantId, AgentId], list[list[BlockRef]]] = {}

    def recover(self) -> list[Manifest]:
        """Return all records; remove blocks that none refers to.

        A record may lack blocks: what comes before the first missing one still serves.
        """
        self.blocks.recover()
        kept = []
        for manifest in self._manifests.load_all():
            self.blocks.retain(manifest.refs)
            kept.append(manifest)
        self._sweep()
        return kept

    # --- names -------------------------------------------------------------------------------

    def spans(
        self,
        tenant: TenantId,
        ids: Sequence[int],
        known: Sequence[BlockSpan] = (),
        same_tokens: int = 0,
    ) -> tuple[BlockSpan, ...]:
        """Cut a tenant's tokens into named blocks; `known` ones cover `same_tokens` of them."""
        return block_spans(self.salt(tenant), self._fingerprint, ids, known, same_tokens)

    def salt(self, tenant: TenantId) -> bytes:
        """Return the key of a tenant's block names."""
        return tenant_salt(self._cluster_key, tenant)

    def state_span(
        self, tenant: TenantId, ids: Sequence[int], spans: Sequence[BlockSpan], end: int
    ) -> BlockSpan:
        """Name the recurrent state behind the first `end` of `ids`."""
        salt = self.salt(tenant)
        span = span_ending(salt, self._fingerprint, ids, spans, end)
        return span.in_group(salt, CacheGroup.STATE)

    def named_refs(self, record: Manifest) -> list[tuple[BlockRef, BlockSpan]]:
        """Pair every block of a record with its place; raise CorruptDataError if one is not.

        Names are made anew from the tokens under this cluster's key: nobody else's are believed.
        """
        ids, salt = record.token_ids, self.salt(record.tenant)
        spans = self.spans(record.tenant, ids)
        named = [(piece.block, span) for piece, span in zip(record.pieces, spans, strict=False)]
        for place in record.windows:
            span = spans[place.start // BLOCK_TOKENS].in_group(salt, CacheGroup.WINDOW)
            named.append((place.block, span))
        named += [
            (place.block, self.state_span(record.tenant, ids, spans, place.end))
            for place in record.states
        ]
        is_whole = len(record.pieces) == len(spans)
        if not is_whole or any(ref.block_hash != span.block_hash for ref, span in named):
            message = "the record's blocks are not those of its tokens"
            raise CorruptDataError(message)
        return named

    # --- read --------------------------------------------------------------------------------

    def shared_stock(self, tenant: TenantId, ids: Sequence[int]) -> Stock:
        """List stored full blocks of any conversation of `tenant` that begin `ids`."""
        stock, salt, groups = Stock(), self.salt(tenant), self._spec.groups
        for span in self.spans(tenant, ids):
            ref = self.blocks.find(span.block_hash) if span.is_full else None
            if ref is None:
                break
            stock.full.append(ref)
            if CacheGroup.WINDOW in groups:
                found = self.blocks.find(span.in_group(salt, CacheGroup.WINDOW).block_hash)
                if found is not None:
                    stock.windows[span.start] = found
            if CacheGroup.STATE in groups:
                found = self.blocks.find(span.in_group(salt, CacheGroup.STATE).block_hash)
                if found is not None:
                    stock.states[span.end] = found
        return stock

    def restore_point(self, stock: Stock, ids: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` of `ids` these blocks bring back."""
        return restore_point(
            limit,
            stock.stored(len(ids)),
            window_tokens=self._spec.window_tokens,
            has_states=CacheGroup.STATE in self._spec.groups,
        )

    def load(
        self,
        tenant: TenantId,
        ids: Sequence[int],
        stock: Stock,
        limit: int,
        cache: ResidentCache,
        loaded_count: int = 0,
        *,
        cancel: threading.Event | None = None,
    ) -> int:
        """Read blocks straight into an unused `cache`; return how many leading tokens are good.

        `ids` are the tokens that the blocks claim to hold. A block that is missing or fails
        any check is taken out of `stock`, and less is restored. The first `loaded_count` full
        blocks are in the cache already. Where `cancel` is set, nothing more is read.
        """
        return _Loading(self, tenant, ids, stock, cache, loaded_count, cancel).run(limit)

    def load_full(
        self,
        tenant: TenantId,
        ids: Sequence[int],
        stock: Stock,
        cache: ResidentCache,
        loaded_count: int = 0,
    ) -> int:
        """Read the full blocks of `stock` alone, which nothing can run on yet; count the good."""
        return _Loading(self, tenant, ids, stock, cache, loaded_count).run_full()

    # --- write -------------------------------------------------------------------------------

    def save_block(self, span: BlockSpan, ids: Sequence[int], kv: memoryview) -> BlockRef:
        """Publish one block's bytes; a no-op if this very block is stored."""
        tokens = ids[span.start : span.end]
        return self.blocks.put(span.parent, span.block_hash, tokens, [kv], span.group)

    def publish(self, manifest: Manifest, previous: Manifest | None) -> None:
        """Make `manifest` the agent's record: the commit point of a turn."""
        before = previous.refs if previous is not None else []
        refs = manifest.refs
        same = _same_refs(before, refs)
        added, removed = refs[same:], before[same:]
        gone = self.blocks.retain(added) + self.blocks.missing(refs[:same])
        if gone:  # erased by another agent's turn since they were found
            self.blocks.release(added)
            message = f"{len(gone)} blocks of the record are not stored any more"
            raise CorruptDataError(message)
        try:
            self._manifests.publish(manifest)
        except BaseException as error:
            if isinstance(error, DiskError) and error.is_in_place:
                self._doubt(manifest, added)
            else:
                self.blocks.release(added)
            raise
        self._settle(manifest)
        if previous is not None:
            self.blocks.release(removed)
            self._sweep()

    def _doubt(self, manifest: Manifest, added: list[BlockRef]) -> None:
        """Keep the new blocks of a record that the disk has but may lose with its power."""
        held = self._doubtful.setdefault((manifest.tenant, manifest.agent), [])
        if held and held[-1] == added:
            self.blocks.release(added)  # tried again: they are kept already
        else:
            held.append(added)

    def _settle(self, manifest: Manifest) -> None:
        """Let go of records that another has replaced for good."""
        for refs in self._doubtful.pop((manifest.tenant, manifest.agent), ()):
            self.blocks.release(refs)

    def _sweep(self) -> None:
        """Remove what nobody needs; the record stands whether that succeeds or not."""
        try:
            self.blocks.sweep()
        except DiskError as error:
            _log.error("blocks that nobody needs stay for now: %s", error.message)

    def erase(self, manifest: Manifest) -> Erased:
        """Remove an agent's record and every block nobody else refers to."""
        self.erase_record(manifest)
        return self.erase_blocks(manifest)

    def erase_record(self, manifest: Manifest) -> None:
        """Remove an agent's record; raise DiskError, and then it still holds its blocks."""
        self._manifests.remove(manifest.tenant, manifest.agent)
        self._settle(manifest)
        self.blocks.release(manifest.refs)

    def erase_blocks(self, manifest: Manifest) -> Erased:
        """Remove the blocks that an erased record has let go of; raise DiskError."""
        refs = list(dict.fromkeys(manifest.refs))
        self.blocks.sweep()
        kept = {ref for ref in refs if self.blocks.has(ref)}
        return Erased(
            blocks_removed=len(refs) - len(kept),
            bytes_removed=sum(ref.payload_bytes for ref in refs if ref not in kept),
            blocks_kept_shared=len(kept),
            bytes_kept_shared=sum(ref.payload_bytes for ref in kept),
        )

    def evict(self, manifests: Sequence[Manifest]) -> None:
        """Remove agents' records and every block that nobody else refers to; raise DiskError."""
        self._manifests.remove_all((record.tenant, record.agent) for record in manifests)
        for record in manifests:
            self.blocks.release(record.refs)
        self._sweep()

    def missing(self, manifest: Manifest) -> list[BlockRef]:
        """List the record's blocks that are not stored here."""
        return self.blocks.missing(dict.fromkeys(manifest.refs))


class _Loading:
    """One restore: the largest point that the stock allows, and a smaller one after a failure."""

    def __init__(
        self,
        store: AgentStore,
        tenant: TenantId,
        ids: Sequence[int],
        stock: Stock,
        cache: ResidentCache,
        loaded_count: int,
        cancel: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._cancel = cancel
        self._tenant = tenant
        self._ids = ids
        self._stock = stock
        self._cache = cache
        self._salt = store.salt(tenant)
        self._spans = store.spans(tenant, ids)
        self._full_count = loaded_count  # blocks read already
        self._is_suspect = False  # one was damaged

    def run(self, limit: int) -> int:
        while limit and (point := self._store.restore_point(self._stock, self._ids, limit)):
            if self._load_full(point) and self._load_windows(point) and self._load_state(point):
                return point
        self._cache.clear_states()
        return 0

    def run_full(self) -> int:
        self._load_full(len(self._stock.full) * BLOCK_TOKENS)
        return self._full_count

    def _load_full(self, point: int) -> bool:
        rows = self._cache.rows()
        for index in range(self._full_count, -(-point // BLOCK_TOKENS)):
            span = self._spans[index]
            views = [row[:, span.start : span.end] for row in rows]
            if not self._read(self._stock.full[index], span, views):
                del self._stock.full[index:]
                return False
            self._full_count = index + 1
        return True

    def _load_windows(self, point: int) -> bool:
        if not self._stock.windows:
            return True
        self._cache.place_windows(point)
        for start in window_blocks(point, self._cache.spec.window_tokens):
            whole, ref = self._spans[start // BLOCK_TOKENS], self._stock.windows[start]
            span = whole.in_group(self._salt, CacheGroup.WINDOW)
            views = self._cache.places(span.start, span.end, CacheGroup.WINDOW)
            if not self._read(ref, span, views):
                del self._stock.windows[start]
                return False
        return True

    def _load_state(self, point: int) -> bool:
        ref = self._stock.states.get(point)
        if ref is None:
            return True
        span = self._store.state_span(self._tenant, self._ids, self._spans, point)
        if not self._read(ref, span, self._cache.state_views()):
            del self._stock.states[point]
            return False
        return True

    def _read(self, ref: BlockRef, span: BlockSpan, views: Sequence[Place | memoryview]) -> bool:
        """Read one block, which must be the very one that its place asks for."""
        if (ref.block_hash, ref.group) != (span.block_hash, span.group):
            return False
        if self._cancel is not None and self._cancel.is_set():
            return False
        tokens = self._ids[span.start : span.end]
        try:
            self._store.blocks.load_into(ref, span.parent, tokens, views)
        except CorruptDataError as error:
            _log.warning("block at token %d is a miss: %s", span.start, error.message)
            if not isinstance(error, BlockMissingError) and not self._is_suspect:
                # What damaged one may have damaged more. Found now, all of it is computed and
                # saved again by this turn; found later, each would cost a turn of its own.
                self._is_suspect = True
                self._store.blocks.verify(self._stock.refs())
            return False
        return True
