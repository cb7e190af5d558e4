"""Forks: new agents that begin with another's context and go ways of their own.

Made of the owner's last saved record. Blocks are shared with it on the same node, and fetched as
for a move on another.
"""

from dataclasses import dataclass, replace

from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import KeepFork
from fabric.errors import ConflictError
from fabric.ids import MigrationId
from fabric.ports import Clock
from fabric.record.rekey import derived_from, owned_anew
from fabric.record.restore_plan import essential
from node.agents.agent import Agent
from node.migration.kept_copies import KeptCopies
from node.runtime.health import Health
from node.store.agent_store import AgentStore
from node.store.service_time import ServiceTime
from node.store.tombstones import TombstoneStore


@dataclass(frozen=True, slots=True)
class ForkTarget:
    """Receives forks of agents from other nodes."""

    clock: Clock
    store: AgentStore
    copies: KeptCopies
    erased: TombstoneStore
    service_time: ServiceTime
    health: Health

    async def keep(self, call: KeepFork) -> AgentView:
        """Own a new agent with the record's KV cache; repeatable until its first turn."""
        offered = await self.copies.decoded(call.manifest)
        key, table = (offered.tenant, call.agent), self.copies.records.table
        known = table.get(key)
        if known is not None and known.manifest.migration == MigrationId(call.operation):
            return known.view()
        self._refuse(known)
        if offered.is_private:
            message = "this agent's memory is for itself alone: share it first"
            raise ConflictError(message, code="not_shared")
        if self.store.missing(offered):  # it was copied: older windows and states stay there
            offered = essential(offered, self.store.spec.window_tokens)
        wall_s = self.clock.wall_s()
        epoch = self.erased.claim_epoch(*key, call.epoch)
        offered = derived_from(offered, self.erased.lender(offered))
        anew = owned_anew(offered, key, self.health.name, epoch, wall_s)
        record = replace(
            anew,
            group=None,
            settings=offered.settings.of_fork() if offered.settings is not None else None,
            sketch=(),  # it is nobody's conversation until it has had a turn
            created_s=wall_s,
            migration=MigrationId(call.operation),  # by which a repeated call is recognised
            provenance=replace(anew.provenance, is_fork=True, served=self.service_time.stamp()),
        )
        await self.copies.budget.make_place(record.tenant)
        table.require_place()
        self._refuse(table.get(key))
        agent = Agent(record)
        agent.came_from_peer = offered.owner != self.health.name
        await self.copies.publish(agent, record, call.migration)
        return agent.view()

    def _refuse(self, known: Agent | None) -> None:
        health = self.health
        if known is not None:
            message = f"an agent is called {known.manifest.agent!r} already"
            raise ConflictError(message, code="agent_exists")
        health.refuse_new()
        if not health.reuses:
            message = f"{health.name} keeps no KV cache of agents: {health.problem}"
            raise ConflictError(message, code="no_reuse")
