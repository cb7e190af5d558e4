"""Target side of a migration: fetch the missing blocks, then publish the record as owner."""

import asyncio
import logging
from dataclasses import dataclass, replace

from fabric.control.node_calls import (
    NOTHING_COPIED,
    AgentView,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
)
from fabric.errors import (
    ConflictError,
    FabricError,
    RejectedError,
    UnauthorizedError,
)
from fabric.ids import MigrationId, NodeName
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import FILE_ALIGN_BYTES
from fabric.net.wire import Urgency
from fabric.record.manifest import Manifest, OwnerState, decode_manifest
from fabric.record.stored_part import trim_restore_points
from node.agents.agent import Agent
from node.engine.moving_streams import MovingStreams
from node.migration.fetching import Fetching
from node.migration.incoming import IncomingMoves, IncomingState
from node.migration.incoming_cleanup import IncomingCleanup
from node.migration.warm_up import WarmUp
from node.runtime.identity import NodeIdentity
from node.store.agent_store import AgentStore
from node.store.service_time import ServiceTime
from node.tiers.agent_records import AgentRecords
from node.tiers.disk_budget import DiskBudget, record_bytes

_log = logging.getLogger(__name__)

COMMIT_WAIT_S = 8.0  # wait for the turn lock of the agent's replica on this node


@dataclass(frozen=True, slots=True)
class IncomingCopies:
    """Copies of agents' blocks to this node, for moves, replicas and forks."""

    identity: NodeIdentity
    store: AgentStore
    budget: DiskBudget
    fetching: Fetching
    moves: IncomingMoves
    warm_up: WarmUp
    cleanup: IncomingCleanup

    async def copy_blocks(self, call: CopyBlocks) -> Copied:
        """Fetch and store the offered record's missing blocks."""
        record = self.decode_offer(call.offer.manifest)
        try:
            copied = await self.copy(call, record)
            if call.offer.live or call.migration in self.warm_up:
                await self.warm_up.extend(call.migration, record)
        finally:
            await self.cleanup.abort_if_given_up(call.migration, record)
        return copied

    async def copy(self, call: CopyBlocks, record: Manifest) -> Copied:
        """Fetch a record's missing blocks; the move pins them until a record refers to them."""
        missing = self.store.missing(record)
        missing_bytes = sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in missing)
        if missing_bytes:
            replicas_only = call.urgency is Urgency.PREFETCH  # evicts no owned agent
            await self.budget.make_room(record.tenant, missing_bytes, replicas_only=replicas_only)
        loop, key = asyncio.get_running_loop(), record.key

        def on_block(ref: BlockRef) -> None:
            loop.call_soon_threadsafe(self.moves.add_block, call.migration, key, ref)

        try:
            with self.moves.copying(record.tenant):
                return await self.fetching.fetch_missing(call, record, on_block)
        except UnauthorizedError as error:  # the router would take it for a refusal of its own key
            message = f"{call.source} no longer offers the agent ({error.message})"
            raise ConflictError(message, code=error.code) from None

    def decode_offer(self, raw: bytes) -> Manifest:
        """Decode an offered record, without blocks that only earlier restore points need."""
        record = replace(decode_manifest(raw), branches=None)
        if record.fingerprint != self.identity.fingerprint:
            message = f"{self.identity.name} runs a different model than the agent's"
            raise ConflictError(message, code="fingerprint_mismatch")
        return trim_restore_points(record, self.store.spec.window_tokens)


@dataclass(frozen=True, slots=True)
class MoveTarget:
    """Target node's side of a move."""

    name: NodeName
    records: AgentRecords
    service_time: ServiceTime
    moves: IncomingMoves
    copies: IncomingCopies
    warm_up: WarmUp
    cleanup: IncomingCleanup
    moving: MovingStreams

    async def commit(self, call: CommitMigration) -> Committed:
        """Fetch the missing blocks and own the agent at `call.epoch`; idempotent.

        Both happen in one call, because the client waits for its next token. The durable
        publish is the commit.
        """
        record = self.copies.decode_offer(call.offer.manifest)
        copied = NOTHING_COPIED
        if self._find_committed(call, record) is None:
            tail = CopyBlocks(call.migration, call.source, call.offer, Urgency.MIGRATION_TAIL)
            if call.migration in self.warm_up:  # a stream ran at the source during the copy
                self.moving.begin_pause(call.migration)
            try:
                copied = await self.copies.copy(tail, record)
                await self.copies.budget.make_room(record.tenant, record_bytes(record))
            finally:
                await self.cleanup.abort_if_given_up(call.migration, record)
        try:
            view = await self._decide(call, record)
        finally:
            self.moves.notify_decided(call.migration)
        return Committed(view, copied)

    async def _decide(self, call: CommitMigration, record: Manifest) -> AgentView:
        """Commit under the move's decision lock, and the turn lock of a replica here."""
        key = record.key
        async with self.moves.decision_lock(key):
            agent = self.records.table.get(key)
            if agent is None or agent.effective_record.epoch >= call.epoch:  # new here, or a repeat
                return await self._commit(call, record)
            # Another task may be evicting the replica, or a turn may be taking it over.
            async with agent.turn_lock.held(COMMIT_WAIT_S, "the agent is in use here"):
                return await self._commit(call, record)

    def _find_committed(self, call: CommitMigration, record: Manifest) -> AgentView | None:
        """Return the agent if this call was executed before; raise if it can never succeed."""
        agent = self.records.table.get(record.key)
        present = agent.effective_record if agent is not None else None
        if agent is not None and present is not None and present.epoch >= call.epoch:
            if present.owner == self.name and present.migration == call.migration:
                return agent.view()
            message = f"the agent is already at epoch {present.epoch} here"
            raise ConflictError(message, code="stale_epoch")
        if self.moves.is_aborted(call.migration):
            message = "this migration was aborted"
            raise ConflictError(message, code="aborted")
        if record.epoch >= call.epoch:
            message = f"epoch {call.epoch} must be above the record's epoch {record.epoch}"
            raise RejectedError(message, code="stale_epoch")
        return None

    async def _load_tail(self, name: MigrationId, record: Manifest) -> None:
        """Load the tail of an incoming agent's cache, if its beginning is already in memory."""
        if name not in self.warm_up:
            return
        try:
            await self.warm_up.extend(name, record)
        except (FabricError, OSError) as error:  # the next turn then restores it
            _log.warning("could not load the tail of an incoming agent's cache: %s", error)
        except Exception:  # noqa: BLE001 - the commit may be durable already
            _log.exception("could not load the tail of an incoming agent's cache")

    async def _commit(self, call: CommitMigration, record: Manifest) -> AgentView:
        repeated = self._find_committed(call, record)
        if repeated is not None:
            return repeated
        move = self.moves.get_or_create(call.migration)
        move.state = IncomingState.COMMITTING
        try:
            agent = await self._publish(call, record)
            move.state = IncomingState.COMMITTED
        finally:
            if move.state is IncomingState.COMMITTING:
                move.state = IncomingState.COPYING  # the commit may be repeated
            self.moves.discard_if_empty(move)
        # The record refers to its blocks now; release the pins of blocks that it does not need.
        await self.cleanup.release_pins(call.migration, agent.manifest.refs)
        return agent.view()

    async def _publish(self, call: CommitMigration, record: Manifest) -> Agent:
        agent = self.records.table.get(record.key)
        owned = replace(
            record,
            state=OwnerState.OWNED,
            owner=self.name,
            epoch=call.epoch,
            revision=record.revision + 1,
            migration=call.migration,  # identifies a repeated commit
            sealed_to=None,
            provenance=replace(record.provenance, served=self.service_time.stamp()),
        )
        if await self.records.missing(owned):
            message = "not all of the agent's blocks have arrived"
            raise ConflictError(message, code="blocks_missing")
        previous = agent.saved if agent is not None else None
        loading = asyncio.create_task(self._load_tail(call.migration, record))
        try:
            await self.records.publish(owned, previous)
        finally:
            await loading
        if agent is None:
            agent = Agent(owned)
        agent.manifest = agent.saved = owned
        agent.layout = None
        agent.cache = self.warm_up.take(call.migration, owned)
        agent.stored_tokens = owned.tokens_count if agent.cache else 0
        agent.is_durable, agent.came_from_peer = True, agent.cache is None
        agent.outgoing.note_owned_here()
        self.records.put(agent)
        return agent
