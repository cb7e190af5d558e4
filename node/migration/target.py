"""The target's side of a migration: fetch what is missing, then own the agent."""

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
from fabric.kvcache.block import BlockRef
from fabric.limits import FILE_ALIGN_BYTES
from fabric.net.wire import Urgency
from fabric.record.manifest import Manifest, OwnerState, decode_manifest
from fabric.record.restore_plan import essential
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
from node.tiers.disk_budget import DiskBudget

_log = logging.getLogger(__name__)

COMMIT_WAIT_S = 8.0  # for whoever holds a copy of the agent here


@dataclass(frozen=True, slots=True)
class IncomingCopies:
    """Copies an agent's blocks to this node for a move, a replica or a fork."""

    identity: NodeIdentity
    store: AgentStore
    budget: DiskBudget
    fetching: Fetching
    moves: IncomingMoves
    warm_up: WarmUp
    end: IncomingCleanup

    async def copy_blocks(self, call: CopyBlocks) -> Copied:
        """Fetch, verify and publish the offered record's blocks that are not here yet."""
        record = self.offered(call.offer.manifest)
        try:
            copied = await self.copy(call, record)
            if call.offer.live or call.migration in self.warm_up:
                await self.warm_up.extend(call.migration, record)
        finally:
            await self.end.forget_if_given_up(call.migration, record)
        return copied

    async def copy(self, call: CopyBlocks, record: Manifest) -> Copied:
        """Fetch what is missing; the move holds it until a record does."""
        missing = self.store.missing(record)
        missing_bytes = sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in missing)
        if missing_bytes:
            replicas_only = call.urgency is Urgency.PREFETCH  # then no owned agent may go for it
            await self.budget.make_room(record.tenant, missing_bytes, replicas_only=replicas_only)
        loop, key = asyncio.get_running_loop(), record.key

        def arrived(ref: BlockRef) -> None:
            loop.call_soon_threadsafe(self.moves.note_block, call.migration, key, ref)

        try:
            with self.moves.copying(record.tenant):
                return await self.fetching.bring(call, record, arrived)
        except UnauthorizedError as error:  # towards the router this would be about its own secret
            message = f"{call.source} does not offer the agent any more ({error.message})"
            raise ConflictError(message, code=error.code) from None

    def offered(self, raw: bytes) -> Manifest:
        """Decode an offered record, less what only earlier points of it need."""
        record = decode_manifest(raw)
        if record.fingerprint != self.identity.fingerprint:
            message = f"{self.identity.name} runs another model than this agent's"
            raise ConflictError(message, code="fingerprint_mismatch")
        return essential(record, self.store.spec.window_tokens)


@dataclass(frozen=True, slots=True)
class MoveTarget:
    """The target node's side of a move."""

    name: NodeName
    records: AgentRecords
    service_time: ServiceTime
    moves: IncomingMoves
    copies: IncomingCopies
    warm_up: WarmUp
    end: IncomingCleanup
    moving: MovingStreams

    async def commit(self, call: CommitMigration) -> Committed:
        """Fetch what is missing and own the agent at `call.epoch`. Repeatable.

        One call, as a client waits for its next token meanwhile. Its durable publish is the commit.
        """
        record = self.copies.offered(call.offer.manifest)
        copied = NOTHING_COPIED
        if self._committed(call, record) is None:
            tail = CopyBlocks(call.migration, call.source, call.offer, Urgency.MIGRATION_TAIL)
            if call.migration in self.warm_up:  # copied while a stream of it ran
                self.moving.fall_silent(call.migration)
            try:
                copied = await self.copies.copy(tail, record)
            finally:
                await self.end.forget_if_given_up(call.migration, record)
        try:
            view = await self._decide(call, record)
        finally:
            self.moves.decide(call.migration)
        return Committed(view, copied)

    async def _decide(self, call: CommitMigration, record: Manifest) -> AgentView:
        key = record.key
        async with self.moves.deciding(key):
            agent = self.records.table.get(key)
            if agent is None or agent.word.epoch >= call.epoch:  # new here, or a repeat
                return await self._commit(call, record)
            # A replica of it may be on its way out, or a turn may take it over.
            async with agent.turn_lock.held(COMMIT_WAIT_S, "the agent is at work here"):
                return await self._commit(call, record)

    def _committed(self, call: CommitMigration, record: Manifest) -> AgentView | None:
        """Return the agent if this very call was carried out before; raise if it never can be."""
        agent = self.records.table.get(record.key)
        if agent is not None and agent.word.epoch >= call.epoch:
            if agent.word.owner == self.name and agent.word.migration == call.migration:
                return agent.view()
            message = f"the agent is already at epoch {agent.word.epoch} here"
            raise ConflictError(message, code="stale_epoch")
        if self.moves.is_aborted(call.migration):
            message = "this migration was aborted"
            raise ConflictError(message, code="aborted")
        if record.epoch >= call.epoch:
            message = f"epoch {call.epoch} does not follow {record.epoch}"
            raise RejectedError(message, code="stale_epoch")
        return None

    async def _load_tail(self, name: MigrationId, record: Manifest) -> None:
        """Read the end of what arrives to memory, if its beginning is there."""
        if name not in self.warm_up:
            return
        try:
            await self.warm_up.extend(name, record)
        except (FabricError, OSError) as error:  # then the next turn restores it
            _log.warning("the end of an agent on its way in was not loaded: %s", error)
        except Exception:  # noqa: BLE001 - the commit that waits for this is durable perhaps
            _log.exception("the end of an agent on its way in was not loaded")

    async def _commit(self, call: CommitMigration, record: Manifest) -> AgentView:
        repeated = self._committed(call, record)
        if repeated is not None:
            return repeated
        move = self.moves.of(call.migration)
        move.state = IncomingState.COMMITTING
        try:
            agent = await self._publish(call, record)
            move.state = IncomingState.COMMITTED
        finally:
            if move.state is IncomingState.COMMITTING:
                move.state = IncomingState.COPYING  # it may be tried again
            self.moves.tidy(move)
        # The record holds its blocks now; a tail copied before the last one is in nobody's.
        await self.end.let_go(call.migration, agent.manifest.refs)
        return agent.view()

    async def _publish(self, call: CommitMigration, record: Manifest) -> Agent:
        agent = self.records.table.get(record.key)
        owned = replace(
            record,
            state=OwnerState.OWNED,
            owner=self.name,
            epoch=call.epoch,
            revision=record.revision + 1,
            migration=call.migration,  # remembered, so that a repeated commit is recognised
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
        agent.outgoing.settle()
        self.records.put(agent)
        return agent
