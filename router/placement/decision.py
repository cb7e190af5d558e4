"""Input and output of placement: facts about a turn, and decisions."""

from dataclasses import dataclass, field
from enum import StrEnum

from fabric.ids import AgentId, NodeName
from fabric.turn.generation import HeadLoan
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
    full: frozenset[NodeName] = frozenset()  # nodes that have no room for it
    may_fetch: bool = True  # its node may take a beginning of the prompt from another one


class How(StrEnum):
    """Way in which a turn is served."""

    STAY = "stay"  # on the node of its agent or conversation
    MOVE = "move"  # on another one, to which its idle agent is moved first
    LOAD = "load"  # begun on a node that has a part of the prompt cached
    FETCH = "fetch"  # begun on a node to which another one sends a beginning of the prompt
    RECOMPUTE = "recompute"  # begun on a node that computes all of the prompt


@dataclass(frozen=True, slots=True)
class Ship:
    """Transfer of an agent's cache from its owner to another node."""

    source: NodeName
    target: NodeName
    missing_bytes: int  # not on the target yet
    travel_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Way in which a turn is served, and where."""

    how: How
    node: NodeName
    terms: Terms = field(default=NO_TERMS, compare=False)
    ship: Ship | None = None  # of a move: what is carried first
    agent: AgentId | None = None  # of a move: whose cache it is
    loan: HeadLoan | None = None  # of which the node may take a part of the prompt
    carried_bytes: int = field(default=0, compare=False)  # of that part
    gain_s: float = field(default=0.0, compare=False)  # of a move: over the turn on the owner

    @property
    def prefill_s(self) -> float:
        """Seconds of prefill that the node is given."""
        return self.terms.prefill_s

    @property
    def source(self) -> NodeName | None:
        """Node from which memory comes, if any does."""
        if self.ship is not None:
            return self.ship.source
        return self.loan.source if self.loan is not None else None

    @property
    def is_cold(self) -> bool:
        """Whether the node begins without anything of its own."""
        return self.how in (How.FETCH, How.RECOMPUTE)
