"""Events of the fleet. None contains text of a prompt or an answer.

An event with a `key` is visible to its agent's tenant; all others are visible to operators, and
`NodeChanged` to every tenant. Field names are those of docs/http-api.md.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, TypeAlias

from fabric.control.node_calls import PRESSURES
from fabric.ids import AgentId, AgentKey, MigrationId, NodeName, TenantId
from fabric.net.links import LinkKind
from fabric.turn.generation import Admitted


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """Event about one agent."""

    name: ClassVar[str]
    key: AgentKey


@dataclass(frozen=True, slots=True)
class AgentFound(AgentEvent):
    """Report of a joining node that it owns the agent."""

    name: ClassVar[str] = "agent.found"
    node: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentCreated(AgentEvent):
    """Creation of an agent by its first turn, a fork or a file."""

    name: ClassVar[str] = "agent.created"
    node: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentMoved(AgentEvent):
    """Change of the agent's owner by a move or a takeover."""

    name: ClassVar[str] = "agent.moved"
    source: NodeName
    target: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentForked(AgentEvent):
    """Fork of an agent with the context of another one."""

    name: ClassVar[str] = "agent.forked"
    forked_from: AgentId
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentHibernated(AgentEvent):
    """Export of the agent to a file; the agent stays."""

    name: ClassVar[str] = "agent.hibernated"
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentResumed(AgentEvent):
    """Import of the agent from a file."""

    name: ClassVar[str] = "agent.resumed"
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentErased(AgentEvent):
    """Erasure of the agent; no node serves it any more."""

    name: ClassVar[str] = "agent.erased"


@dataclass(frozen=True, slots=True)
class AgentEvicted(AgentEvent):
    """Removal of the agent from one node."""

    name: ClassVar[str] = "agent.evicted"
    node: NodeName
    replica: bool


@dataclass(frozen=True, slots=True)
class TurnBegan(AgentEvent):
    """Admission of a turn by a node."""

    name: ClassVar[str] = "turn.began"
    node: NodeName
    epoch: int
    cache: str
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, tenant: TenantId, admitted: Admitted) -> "TurnBegan":
        """Return the event of a node's admission."""
        return cls(
            (tenant, admitted.agent),
            admitted.node,
            admitted.epoch,
            admitted.cache,
            admitted.prompt_tokens,
            admitted.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class TurnEnded(AgentEvent):
    """End of a turn, with its outcome (ok, failed or cancelled) and its last node."""

    name: ClassVar[str] = "turn.ended"
    node: NodeName
    outcome: str
    completion_tokens: int
    seconds: float


class MoveState(StrEnum):
    """Progress of a move."""

    COPYING = "copying"  # published again after every copied part
    SEALED = "sealed"
    COMMITTED = "committed"
    FAILED = "failed"  # and undone; `agent.moved` follows if the agent moved all the same


@dataclass(frozen=True, slots=True)
class MoveChanged(AgentEvent):
    """Progress of a move, and the bytes sent."""

    name: ClassVar[str] = "move.state"
    move: MigrationId
    source: NodeName
    target: NodeName
    state: MoveState
    blocks_sent: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    code: str | None = None  # why it failed


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """Change of a node's state; `before` is None for a node that is new."""

    name: ClassVar[str] = "node.state"
    node: NodeName
    state: str  # as in GET /v1/nodes
    before: str | None


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """Memory pressure on a node's machine, and the budget of its agents' caches."""

    name: ClassVar[str] = "node.memory"
    node: NodeName
    pressure: str  # normal, warning or critical
    hot_limit_bytes: int
    hot_total_bytes: int

    @property
    def is_usual(self) -> bool:
        """Whether there is no pressure, and caches have their planned budget."""
        return self.pressure == PRESSURES[0] and self.hot_limit_bytes == self.hot_total_bytes


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """Progress of a node's drain: draining, drained or stuck."""

    name: ClassVar[str] = "drain.state"
    node: NodeName
    state: str
    agents_moved: int
    agents_left: int
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """Rate of the best link of a kind from a peer to a node."""

    name: ClassVar[str] = "link.rate"
    node: NodeName
    peer: NodeName
    kind: LinkKind
    bytes_per_s: float
    rtt_s: float | None


FleetEvent: TypeAlias = AgentEvent | NodeChanged | MemoryChanged | DrainChanged | LinkMeasured


def concerns(event: FleetEvent, tenant: TenantId) -> bool:
    """Return whether a tenant may see an event; operators may see all."""
    if isinstance(event, AgentEvent):
        return event.key[0] == tenant
    return isinstance(event, NodeChanged)
