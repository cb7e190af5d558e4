"""Control messages for replicas and forks of agents.

    replica   offer_copy → copy_blocks → keep_replica → abort_migration (the offer is withdrawn)
    fork      offer_copy → [copy_blocks] → keep_fork → abort_migration

A copy never changes the agent that it is made of: its last saved record is offered.
"""

from dataclasses import dataclass

from fabric.control.agent_at import AgentAt, AgentName, OfferRequest
from fabric.ids import AgentId, MigrationId, NodeName, OperationId


@dataclass(frozen=True, slots=True)
class OfferCopy(OfferRequest):
    """Request to the owner to offer its last saved record to `target`; turns continue."""

    verify: bool = False  # a copy arrived damaged: verify the stored blocks first


@dataclass(frozen=True, slots=True)
class KeepReplica:
    """Request to the target to store the record of `source`, replacing an earlier replica."""

    migration: MigrationId
    manifest: bytes
    source: NodeName
    kept: bool = False


@dataclass(frozen=True, slots=True)
class KeepFork:
    """Request to the target to own a new agent with the record's KV cache; repeatable."""

    migration: MigrationId
    manifest: bytes
    operation: OperationId
    agent: AgentId
    epoch: int


@dataclass(frozen=True, slots=True)
class TakeOver(AgentAt):
    """Request to a node with a replica to own the agent at `epoch`, as its owner is lost."""


@dataclass(frozen=True, slots=True)
class DropReplica(AgentName):
    """Request to a node that does not own an agent to delete its replica."""
