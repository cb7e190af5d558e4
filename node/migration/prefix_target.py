"""Shared prefixes fetched from other nodes and leased here, without an agent on this node.

Blocks are fetched and verified like those of a move: their names are recomputed from the tokens
under this cluster's key and the tenant's salt. Nothing is evicted for them, on disk or in memory.
"""

import asyncio
import threading
from dataclasses import dataclass, field

from fabric.control.node_calls import Copied, CopyBlocks, Done
from fabric.control.span_calls import ReturnSpans, TakeSpan
from fabric.errors import (
    ConflictError,
    FabricError,
    RejectedError,
    RetryLaterError,
    UnauthorizedError,
)
from fabric.ids import SELF_TEST_TENANT
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import FILE_ALIGN_BYTES
from fabric.net.wire import Urgency
from fabric.record.manifest import Manifest
from node.migration.fetching import Fetching
from node.migration.incoming import IncomingMoves
from node.migration.incoming_cleanup import IncomingCleanup
from node.migration.prefix_source import cut_record
from node.migration.target import IncomingCopies
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.disk_budget import DiskBudget
from node.tiers.span_leases import SpanLeases


@dataclass(frozen=True, slots=True)
class SharedPrefixTarget:
    """Receiver of other nodes' shared prefixes."""

    identity: NodeIdentity
    store: AgentStore
    workers: Workers
    budget: DiskBudget
    leases: SpanLeases
    copies: IncomingCopies
    fetching: Fetching
    moves: IncomingMoves
    cleanup: IncomingCleanup
    health: Health
    _take_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(self, call: TakeSpan) -> Copied:
        """Fetch an offered prefix's missing blocks and lease them; a repeated call renews it."""
        record = self.copies.decode_offer(call.offer.manifest)
        self._require_sharable(record)
        if self._take_lock.locked():
            message = "this node is fetching another prefix"
            raise RetryLaterError(message, code="busy")
        copy = CopyBlocks(call.migration, call.source, call.offer, Urgency.PREFETCH)
        async with self._take_lock:
            await self._make_room(record)
            try:
                copied = await self._fetch(copy, record)
                self._lease(copy, record)
            finally:
                # From here on, the lease holds its blocks.
                await self.cleanup.release_pins(call.migration, ())
        return copied

    async def take_head(self, copy: CopyBlocks, record: Manifest, cancel: threading.Event) -> int:
        """Fetch and lease a prefix that a turn waits for, until `cancel` is set; return its tokens.

        It may use the disk space that the turn would need to store the same blocks. If the fetch
        fails, the blocks that arrived before the first missing one are leased.
        """
        self._require_sharable(record)
        missing = self.store.missing(record)
        size_bytes = sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in missing)
        await self.budget.make_room(record.tenant, size_bytes)
        try:
            try:
                await self._fetch(copy, record, cancel)
            except (FabricError, OSError):
                arrived = await self.workers.run(lambda: _stored_record(self.store, record))
                if arrived is None:
                    raise
                record = arrived
            self._lease(copy, record)
        finally:
            await self.cleanup.release_pins(copy.migration, ())
        return record.tokens_count

    async def give_back(self, call: ReturnSpans) -> Done:
        """End the leases that came from an agent, since it has become private."""
        self.leases.give_back(call.key)
        await self.workers.run(self.store.sweep)
        return Done()

    async def _fetch(
        self, call: CopyBlocks, record: Manifest, cancel: threading.Event | None = None
    ) -> Copied:
        loop, key = asyncio.get_running_loop(), record.key

        def on_block(ref: BlockRef) -> None:
            loop.call_soon_threadsafe(self.moves.add_block, call.migration, key, ref)

        try:
            with self.moves.copying(record.tenant):
                return await self.fetching.fetch_missing(call, record, on_block, cancel)
        except UnauthorizedError as error:  # the router would take it for a refusal of its own key
            message = f"{call.source} no longer offers this prefix ({error.message})"
            raise ConflictError(message, code=error.code) from None

    def _lease(self, call: CopyBlocks, record: Manifest) -> None:
        """Lease a prefix whose blocks have arrived."""
        if self.moves.is_aborted(call.migration) or self.leases.is_erased(record):
            message = "this copy was aborted"
            raise ConflictError(message, code="aborted")
        if not self.leases.keep(record):
            message = "blocks of this prefix were removed during the fetch; offer it again"
            raise ConflictError(message, code="blocks_missing")

    def _require_sharable(self, record: Manifest) -> None:
        self.health.refuse_new()
        if not self.health.reuses or self.health.degraded is not None:
            message = "this node does not store blocks now"
            raise ConflictError(message, code="not_wanted")
        if record.is_private or record.edited is not None or record.tenant == SELF_TEST_TENANT:
            message = "this prefix must not be shared"
            raise RejectedError(message, code="not_shared")
        if self.leases.is_erased(record):
            message = "the agent of this prefix was erased"
            raise ConflictError(message, code="erased")

    async def _make_room(self, record: Manifest) -> None:
        """Raise ConflictError if the prefix needs more than its share or an eviction."""
        missing = set(self.store.missing(record))
        size_bytes = sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in missing)
        leased = self.leases.refs | set(record.refs)
        is_over = sum(ref.payload_bytes for ref in leased) > self.identity.settings.popular_bytes
        if is_over or not await self.budget.take_free(record.tenant, size_bytes):
            message = "this node has no room for more shared prefixes"
            raise ConflictError(message, code="no_room")


def _stored_record(store: AgentStore, record: Manifest) -> Manifest | None:
    """Return the record of the blocks that are stored, up to the first missing one."""
    missing = set(store.blocks.missing(record.refs))
    blocks = record.pieces.blocks
    count = next((at for at, ref in enumerate(blocks) if ref in missing), len(blocks))
    return cut_record(store, record, count)
