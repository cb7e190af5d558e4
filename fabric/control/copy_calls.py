"""Control messages for copies of agents, for agents wanted in memory, and for emptying a node.

    replica   offer_copy → copy_blocks → keep_replica → abort_migration (the offer is withdrawn)
    fork      offer_copy → [copy_blocks] → keep_fork → abort_migration
    spans     offer_spans → take_span, once for each → abort_migration

A copy never touches the agent that it is made of: what is offered is its last saved record.
"""

from dataclasses import dataclass

from fabric.control.agent_at import AgentAt, AgentName, OfferRequest
from fabric.control.node_calls import Offer
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
class TakeOver(AgentAt):
    """To a node with a replica: own the agent at `epoch`, because its owner is lost."""


@dataclass(frozen=True, slots=True)
class OfferSpans:
    """To a node with agents: offer `target` what several of them begin with."""

    migration: MigrationId
    target: NodeName


@dataclass(frozen=True, slots=True)
class SpanOffer(AgentName):
    """The beginning of one agent's record, which `sharers` agents of its tenant have."""

    offer: Offer
    sharers: int


@dataclass(frozen=True, slots=True)
class SpanOffers:
    """Offered spans, the most shared first."""

    spans: tuple[SpanOffer, ...]


@dataclass(frozen=True, slots=True)
class TakeSpan:
    """To the target: fetch one offered beginning, and keep it for a while."""

    migration: MigrationId
    source: NodeName
    offer: Offer


@dataclass(frozen=True, slots=True)
class ReturnSpans(AgentName):
    """To a node that may have borrowed: let go of what came from this agent, and is on its way."""


@dataclass(frozen=True, slots=True)
class PrefetchAgent(AgentAt):
    """To the owner: bring the agent from disk into memory; with `cancel`, let that be."""

    cancel: bool = False


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Take no new agents from now on, also after a restart; or take them again."""

    draining: bool
