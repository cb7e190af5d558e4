"""Make a copied record an agent of this node: what replicas and forks have in common."""

from dataclasses import dataclass

from fabric.errors import ConflictError, CorruptDataError
from fabric.ids import MigrationId
from fabric.record.manifest import Manifest, OwnerState, decode_manifest
from node.agents.agent import Agent
from node.migration.incoming import IncomingMoves
from node.migration.incoming_cleanup import IncomingCleanup
from node.runtime.identity import NodeIdentity
from node.tiers.agent_records import AgentRecords
from node.tiers.disk_budget import DiskBudget
from node.tiers.disk_tier import record_bytes


@dataclass(frozen=True, slots=True)
class KeptCopies:
    """Stores replicas on a node."""

    identity: NodeIdentity
    records: AgentRecords
    budget: DiskBudget
    moves: IncomingMoves
    end: IncomingCleanup

    async def decoded(self, raw: bytes) -> Manifest:
        """Check a record as one from outside: nothing but its tokens names its blocks."""
        record = decode_manifest(raw)
        if record.fingerprint != self.identity.fingerprint:
            message = f"{self.identity.name} runs another model than this agent's"
            raise ConflictError(message, code="fingerprint_mismatch")
        await self.records.workers.run(lambda: self.records.store.named_refs(record))
        return record

    async def publish(self, agent: Agent, record: Manifest, migration: MigrationId) -> None:
        """Make `record` the agent's; turns of it wait, and a failure leaves all as it was."""
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
                    agent.was_evicted = True  # turns that wait for it begin anew
                    table.forget(agent)
                raise
            agent.manifest = agent.saved = record
            agent.is_durable, agent.cache, agent.stored_tokens = True, None, 0
            agent.named, agent.layout = ((), ()), None
            agent.came_from_peer = agent.came_from_peer or record.state is OwnerState.REPLICA
            table.put(agent)
        self.records.hot.note()
        await self.end.let_go(migration, record.refs)  # the record holds its blocks now

    async def _store(self, record: Manifest, previous: Manifest | None) -> None:
        is_replica = record.state is OwnerState.REPLICA
        await self.budget.make_room(record.tenant, record_bytes(record), replicas_only=is_replica)
        missing = await self.records.missing(record)
        if missing:
            message = f"{len(missing)} of the agent's blocks are not here"
            raise ConflictError(message, code="blocks_missing")
        try:
            await self.records.publish(record, previous)
        except CorruptDataError:
            message = "blocks of the agent went while it was copied"
            raise ConflictError(message, code="blocks_missing") from None
