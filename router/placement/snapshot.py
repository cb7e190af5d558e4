"""The fleet at one moment, as far as one turn or one agent needs it: all that a decision reads.

Only `router.fleet.snapshots` takes one, from what the nodes last said of themselves and of the
agent, and from what this router has given them since.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fabric.control.node_calls import DRAINING, READY, AgentView, NodeView
from fabric.ids import AgentId, NodeName


class HolderRole(StrEnum):
    """Role of a node towards an agent."""

    STARTING = "starting"  # its first turn is on its way there
    OWNER = "owner"
    RELEASED = "stepped down"  # nobody could say who owns it; it was the last to
    COPY = "copy"  # a replica, or a claim that a later one puts an end to
    ERASED = "erased"  # what it has was erased, and is not gone yet


@dataclass(frozen=True, slots=True)
class AgentHolder:
    """A node that has an agent, or is about to."""

    node: NodeName
    role: HolderRole
    view: AgentView | None = None  # missing until the node lists it


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A node that holds the beginning of a prompt."""

    node: NodeName
    share: float  # of the prompt's text
    agent: AgentId | None = None  # whose whole conversation the prompt goes on with
    group: str | None = None  # that agent's
    is_replica: bool = False
    is_resident: bool = False  # that agent is in memory there, not on disk alone


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node: its last words, its lease, and what it was given since."""

    view: NodeView
    is_alive: bool = True  # heard in its last moments
    is_up: bool = True  # its lease has not run out
    is_returning: bool = False  # it was lost, and is starting again
    promised_s: float = 0.0  # prefill given to it and not finished
    turns: int = 0  # given to it and not ended
    agents: int = 0  # that live there, those just given to it included
    turn_order: int = 0  # the higher, the later it was given any turn
    cold_order: int = 0  # the same for turns with nothing cached
    coming_bytes: int = 0  # of agents on their way there

    @property
    def name(self) -> NodeName:
        return self.view.name

    @property
    def held_tokens(self) -> int:
        """How many tokens of agents it holds, or is about to."""
        return self.view.tokens + self.coming_bytes // max(1, self.view.bytes_per_token)

    @property
    def is_ready(self) -> bool:
        """Say whether it takes new agents."""
        return self.is_alive and self.view.state == READY

    @property
    def is_draining(self) -> bool:
        """Say whether its own agents leave, and no other comes."""
        return self.is_alive and self.view.state == DRAINING


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """The nodes that have spoken, by name, and what they hold of one agent or prompt."""

    nodes: Mapping[NodeName, NodeSnapshot]
    holders: tuple[AgentHolder, ...] = ()  # who should serve it first, then the latest copies
    prefixes: tuple[PrefixHolder, ...] = ()  # the longest first
    group_nodes: tuple[NodeName, ...] = ()  # owners of the group's other conversations

    @property
    def owner(self) -> AgentHolder | None:
        return next((each for each in self.holders if each.role is HolderRole.OWNER), None)
