"""Copies that become agents of this node: replicas, and forks that begin with another's context.

Both are made of the owner's last saved record. Blocks are shared with it on the same node, and
fetched as for a move from another.
"""

from dataclasses import dataclass, replace

from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import KeepFork, KeepReplica
from fabric.errors import ConflictError, CorruptDataError
from fabric.ids import MigrationId
from fabric.ports import Clock
from fabric.record.manifest import Manifest, OwnerState, decode_manifest
from fabric.record.rekey import derived_from, with_new_owner
from fabric.record.stored_part import trim_restore_points
from node.agents.agent import Agent
from node.migration.incoming import IncomingMoves
from node.migration.incoming_cleanup import IncomingCleanup
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.store.agent_store import AgentStore
from node.store.service_time import ServiceTime
from node.store.tombstones import TombstoneStore
from node.tiers.agent_records import AgentRecords
from node.tiers.disk_budget import DiskBudget, record_bytes


@dataclass(frozen=True, slots=True)
class CopyPublisher:
    """Publisher of copied records as agents of this node."""

    identity: NodeIdentity
    records: AgentRecords
    budget: DiskBudget
    moves: IncomingMoves
    cleanup: IncomingCleanup

    async def decode(self, raw: bytes) -> Manifest:
        """Decode a record from another node, and derive its blocks' names from its tokens."""
        record = replace(decode_manifest(raw), branches=None)
        if record.fingerprint != self.identity.fingerprint:
            message = f"{self.identity.name} runs a different model than the agent's"
            raise ConflictError(message, code="fingerprint_mismatch")
        await self.records.workers.run(lambda: self.records.store.named_refs(record))
        return record

    async def publish(self, agent: Agent, record: Manifest, migration: MigrationId) -> None:
        """Publish `record` for an agent while its turns wait; a failure changes nothing."""
        if self.moves.is_aborted(migration):
            message = "this copy was aborted"
            raise ConflictError(message, code="aborted")
        table = self.records.table
        is_new = table.get(agent.key) is None
        if is_new:
            table.put(agent)
        async with agent.turn_lock:
            try:
                await self._store(record, agent.saved)
            except BaseException:
                if is_new:
                    agent.was_evicted = True  # turns that wait for it start again
                    table.forget(agent)
                raise
            agent.manifest = agent.saved = record
            agent.is_durable, agent.cache, agent.stored_tokens = True, None, 0
            agent.named, agent.layout = ((), ()), None
            agent.came_from_peer = agent.came_from_peer or record.state is OwnerState.REPLICA
            table.put(agent)
        self.records.hot.note()
        await self.cleanup.release_pins(migration, record.refs)  # the record holds its blocks now

    async def _store(self, record: Manifest, previous: Manifest | None) -> None:
        is_replica = record.state is OwnerState.REPLICA
        await self.budget.make_room(record.tenant, record_bytes(record), replicas_only=is_replica)
        missing = await self.records.missing(record)
        if missing:
            message = f"{len(missing)} of the agent's blocks are missing here"
            raise ConflictError(message, code="blocks_missing")
        try:
            await self.records.publish(record, previous)
        except CorruptDataError:
            message = "blocks of the agent were removed during the copy; copy it again"
            raise ConflictError(message, code="blocks_missing") from None


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """Receives replicas from other nodes."""

    store: AgentStore
    moves: IncomingMoves
    copies: CopyPublisher
    cleanup: IncomingCleanup

    async def keep(self, call: KeepReplica) -> AgentView:
        """Publish the record as a replica, unless a later record is stored; idempotent."""
        decoded = await self.copies.decode(call.manifest)
        offered = trim_restore_points(decoded, self.store.spec.window_tokens)
        # A commit may make this node the owner.
        async with self.moves.decision_lock(offered.key):
            return await self._keep(call, offered)

    async def _keep(self, call: KeepReplica, offered: Manifest) -> AgentView:
        table = self.copies.records.table
        agent = table.get(offered.key)
        if agent is not None:
            _check_replaceable(agent, offered)
        else:
            table.require_room()
        previous = agent.saved if agent is not None else None
        record = _replica(offered, call, previous)
        if previous is not None and replace(record, revision=previous.revision) == previous:
            await self.cleanup.release_pins(call.migration, ())
            assert agent is not None, "it has a record"
            return agent.view()
        agent = agent or Agent(record)
        await self.copies.publish(agent, record, call.migration)
        return agent.view()


def _replica(offered: Manifest, call: KeepReplica, previous: Manifest | None) -> Manifest:
    revision = offered.revision
    if previous is not None and previous.epoch == offered.epoch:
        # A revision never decreases. The record of a released owner may count more turns than its
        # successor's.
        revision = max(revision, previous.revision + 1)
    return replace(
        offered,
        state=OwnerState.REPLICA,
        owner=call.source,
        revision=revision,
        migration=None,
        sealed_to=None,
        provenance=replace(offered.provenance, copied_revision=offered.revision, is_kept=call.kept),
    )


def _check_replaceable(agent: Agent, offered: Manifest) -> None:
    present = agent.effective_record
    if present.state is not OwnerState.REPLICA:
        message = f"the agent is {present.state} here"
        raise ConflictError(message, code="not_a_replica")
    copied = present.provenance.copied_revision or 0
    if (present.epoch, copied) > (offered.epoch, offered.revision):
        message = f"a later copy is stored here: epoch {present.epoch}, revision {copied}"
        raise ConflictError(message, code="stale_copy")
    if agent.is_busy:
        message = "a turn on this node is taking the agent over"
        raise ConflictError(message, code="agent_busy")


@dataclass(frozen=True, slots=True)
class ForkTarget:
    """Receives forks of agents from other nodes."""

    clock: Clock
    store: AgentStore
    copies: CopyPublisher
    erased: TombstoneStore
    service_time: ServiceTime
    health: Health

    async def keep(self, call: KeepFork) -> AgentView:
        """Create an agent with the record's KV cache; idempotent until its first turn."""
        offered = await self.copies.decode(call.manifest)
        key, table = (offered.tenant, call.agent), self.copies.records.table
        present = table.get(key)
        if present is not None and present.manifest.migration == MigrationId(call.operation):
            return present.view()
        self._refuse(present)
        if offered.is_private:
            message = "this agent's memory is private: share it first"
            raise ConflictError(message, code="not_shared")
        if self.store.missing(offered):  # fetched from a peer, which keeps older windows and states
            offered = trim_restore_points(offered, self.store.spec.window_tokens)
        wall_s = self.clock.wall_s()
        epoch = self.erased.claim_epoch(*key, call.epoch)
        offered = derived_from(offered, self.erased.lender(offered))
        anew = with_new_owner(offered, key, self.health.name, epoch, wall_s)
        record = replace(
            anew,
            group=None,
            settings=offered.settings.of_fork() if offered.settings is not None else None,
            form=None,
            sketch=(),  # matches no conversation until its first turn
            created_s=wall_s,
            migration=MigrationId(call.operation),  # identifies a repeated call
            provenance=replace(
                anew.provenance, is_fork=True, served=self.service_time.stamp(), turns=""
            ),
        )
        await self.copies.budget.make_place(record.tenant)
        table.require_room()
        self._refuse(table.get(key))
        agent = Agent(record)
        agent.came_from_peer = offered.owner != self.health.name
        await self.copies.publish(agent, record, call.migration)
        return agent.view()

    def _refuse(self, known: Agent | None) -> None:
        health = self.health
        if known is not None:
            message = f"an agent named {known.manifest.agent!r} exists already"
            raise ConflictError(message, code="agent_exists")
        health.refuse_new()
        if not health.reuses:
            message = f"{health.name} does not reuse KV caches: {health.problem}"
            raise ConflictError(message, code="no_reuse")
