"""What can happen in a fleet. None of it holds text of a prompt or an answer.

What has a `key` concerns one agent, and so its tenant; all else concerns the operators, and
`NodeChanged` everybody. Field names are those of docs/http-api.md.
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
    """Something about one agent."""

    name: ClassVar[str]
    key: AgentKey


@dataclass(frozen=True, slots=True)
class AgentFound(AgentEvent):
    """A node that came told of an agent that it owns."""

    name: ClassVar[str] = "agent.found"
    node: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentCreated(AgentEvent):
    """A new agent: by its first turn, a fork or a file."""

    name: ClassVar[str] = "agent.created"
    node: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentMoved(AgentEvent):
    """Another node owns the agent: by a move, or because it took over."""

    name: ClassVar[str] = "agent.moved"
    source: NodeName
    target: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentForked(AgentEvent):
    """The agent was made with the context of another one."""

    name: ClassVar[str] = "agent.forked"
    forked_from: AgentId
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentHibernated(AgentEvent):
    """The agent's file is on its way to a client; the agent stays."""

    name: ClassVar[str] = "agent.hibernated"
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentResumed(AgentEvent):
    """The agent came from a file."""

    name: ClassVar[str] = "agent.resumed"
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentErased(AgentEvent):
    """An agent was erased; no node serves it any more, whatever it still stores."""

    name: ClassVar[str] = "agent.erased"


@dataclass(frozen=True, slots=True)
class AgentEvicted(AgentEvent):
    """A node has no longer what it had of the agent."""

    name: ClassVar[str] = "agent.evicted"
    node: NodeName
    replica: bool


@dataclass(frozen=True, slots=True)
class TurnBegan(AgentEvent):
    """A node has admitted a turn."""

    name: ClassVar[str] = "turn.began"
    node: NodeName
    epoch: int
    cache: str
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, tenant: TenantId, admitted: Admitted) -> "TurnBegan":
        """Tell what a node said when it took the turn."""
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
    """A turn is over: ok, failed or cancelled. Where it ended is where it had moved to."""

    name: ClassVar[str] = "turn.ended"
    node: NodeName
    outcome: str
    completion_tokens: int
    seconds: float


class MoveState(StrEnum):
    """Progress of a move."""

    COPYING = "copying"  # told again whenever a part was copied
    SEALED = "sealed"
    COMMITTED = "committed"
    FAILED = "failed"  # and put back; `agent.moved` tells of one that went all the same


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
    """A node is in another state than before; `before` is None for one that was never met."""

    name: ClassVar[str] = "node.state"
    node: NodeName
    state: str  # as GET /v1/nodes spells it
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
        """Whether the caches may hold what was planned."""
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
    """Say whether a tenant may learn of an event; operators may of all."""
    if isinstance(event, AgentEvent):
        return event.key[0] == tenant
    return isinstance(event, NodeChanged)
