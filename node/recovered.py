"""The agents that a node finds on its disk when it starts."""

from dataclasses import replace

from fabric.ids import Fingerprint
from fabric.manifest import OwnerState
from fabric.ports import Clock
from node.agent import Agent
from node.agent_store import AgentStore
from node.agent_table import AgentTable
from node.node import NodeConfig


def recovered_table(
    config: NodeConfig, fingerprint: Fingerprint, clock: Clock, store: AgentStore
) -> AgentTable:
    """Recover the store and return its agents in a table; raise DiskError."""
    table = AgentTable(config.name, fingerprint, clock, config.settings.rules)
    for record in store.recover():
        agent = Agent(record, saved=record, is_durable=True)
        if record.owner != config.name and record.state is OwnerState.OWNED:
            # The folder was copied from another node: its blocks are as good as a replica's.
            agent.manifest = replace(record, state=OwnerState.REPLICA)
        table.put(agent)
    return table
