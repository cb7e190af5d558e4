"""The agents that a node finds on its disk when it starts."""

from dataclasses import replace

from fabric.ids import Fingerprint, NodeName
from fabric.ports import Clock
from fabric.record.manifest import OwnerState
from fabric.retention.policy import Rules
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.store.agent_store import AgentStore
from node.store.service_time import ServiceTime


def recovered_table(
    name: NodeName,
    fingerprint: Fingerprint,
    clock: Clock,
    store: AgentStore,
    rules: Rules,
    service_time: ServiceTime | None = None,
) -> AgentTable:
    """Recover the store and return its agents in a table; raise DiskError."""
    table = AgentTable(name, fingerprint, clock, rules)
    for record in sorted(store.recover(), key=lambda record: record.used_s):
        agent = Agent(record, saved=record, is_durable=True)
        if record.owner != name and record.state is OwnerState.OWNED:
            # The folder was copied from another node: its blocks are as good as a replica's.
            agent.manifest = replace(record, state=OwnerState.REPLICA)
        if service_time is not None:
            table.use.recover(record, service_time.idle_s(record))
        table.put(agent)
    return table
