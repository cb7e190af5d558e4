"""Input and output of placement: facts about a turn, and decisions."""

from dataclasses import dataclass, field

from fabric.ids import AgentId, NodeName
from router.placement.terms import NO_TERMS, Terms


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """Facts about a turn that its placement depends on."""

    model: str
    prompt_tokens: int
    completion_tokens_max: int
    home_seed: str  # gives conversations without any other trace the same node
    agent: AgentId | None = None  # as named by the turn
    group: AgentId | None = None  # as named instead of an agent
    given_up: frozenset[NodeName] = frozenset()  # nodes that did not take it


@dataclass(frozen=True, slots=True)
class Stay:
    """Decision to serve the turn on the node of its agent or conversation."""

    node: NodeName
    prefill_s: float = 0.0
    terms: Terms = field(default=NO_TERMS, compare=False)


@dataclass(frozen=True, slots=True)
class Ship:
    """Transfer of an agent's cache from its owner to another node."""

    source: NodeName
    target: NodeName
    missing_bytes: int  # not on the target yet
    travel_s: float


@dataclass(frozen=True, slots=True)
class MoveAgent:
    """Decision to move an idle agent from its owner, and to serve the turn on the new one."""

    agent: AgentId
    ship: Ship
    prefill_s: float
    gain_s: float = 0.0  # estimated, over the turn on the owner
    terms: Terms = field(default=NO_TERMS, compare=False)

    @property
    def node(self) -> NodeName:
        """Node that serves the turn."""
        return self.ship.target


@dataclass(frozen=True, slots=True)
class Load:
    """Decision to start on a node that has part of the prompt cached."""

    node: NodeName
    prefill_s: float
    terms: Terms = field(default=NO_TERMS, compare=False)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Decision to start on a node that has nothing of the prompt cached."""

    node: NodeName
    prefill_s: float
    terms: Terms = field(default=NO_TERMS, compare=False)


Decision = Stay | MoveAgent | Load | Recompute
