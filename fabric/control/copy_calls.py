"""Control messages for copies of agents, for agents wanted in memory, and for emptying a node.

    replica   offer_copy → copy_blocks → keep_replica → abort_migration (the offer is withdrawn)
    fork      offer_copy → [copy_blocks] → keep_fork → abort_migration

A copy never touches the agent that it is made of: what is offered is its last saved record.
"""

from dataclasses import dataclass

from fabric.control.agent_at import AgentAt, OfferRequest
from fabric.ids import AgentId, MigrationId, NodeName, OperationId


@dataclass(frozen=True, slots=True)
class OfferCopy(OfferRequest):
    """To the owner: offer the last saved record to `target`; turns go on."""

    verify: bool = False  # a copy of it arrived damaged: read what is stored first


@dataclass(frozen=True, slots=True)
class KeepReplica:
    """To the target: keep the record of `source` as a replica; an earlier one gives way."""

    migration: MigrationId
    manifest: bytes
    source: NodeName
    kept: bool = False


@dataclass(frozen=True, slots=True)
class KeepFork:
    """To the target: own a new agent with the record's KV cache. A repeat finds it there."""

    migration: MigrationId
    manifest: bytes
    operation: OperationId
    agent: AgentId
    epoch: int


@dataclass(frozen=True, slots=True)
class PrefetchAgent(AgentAt):
    """To the owner: bring the agent from disk into memory; with `cancel`, let that be."""

    cancel: bool = False


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Take no new agents from now on, also after a restart; or take them again."""

    draining: bool
