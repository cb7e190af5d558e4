"""Input and output of placement: facts about a turn, and decisions with their terms in seconds.

The terms of a decision are kept with what then happened (`router.turns.decision_log`), so that each
can be compared with the truth.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from fabric.ids import AgentId, NodeName
from fabric.turn.generation import HeadLoan

ANSWER_WEIGHT: Final = 0.25  # of a second of the answer, beside one until its first token


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
    may_fetch: bool = True  # its node may fetch a beginning of the prompt from another one


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
class Terms:
    """Estimated seconds of a turn on one node, by cause."""

    queue_s: float = 0.0  # in which other prompts are computed
    bring_s: float = 0.0  # in which its memory travels, longer than the queue
    load_s: float = 0.0  # from disk into memory
    prefill_s: float = 0.0  # of what is not cached of its prompt
    answer_s: float = 0.0  # of its answer, with what that costs the answers beside it
    delay_s: float = 0.0  # by which other prompts end later, all together
    evict_s: float = 0.0  # to load again what must leave memory for it, if it is used again
    share_s: float = 0.0  # penalty of a node that has its share of agents
    risk_s: float = 0.0  # penalty of a node that is hot, or short of memory
    price_s: float = 0.0  # of a move: its commit, and a margin for rough estimates

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token."""
        return self.queue_s + self.bring_s + self.load_s + self.prefill_s

    @property
    def felt_s(self) -> float:
        """Seconds until the first token, with those that others lose, and the penalties."""
        return self.first_token_s + self.delay_s + self.evict_s + self.share_s + self.risk_s

    @property
    def total_s(self) -> float:
        """All terms together: what decisions compare; an answer is read while it comes."""
        return self.felt_s + ANSWER_WEIGHT * self.answer_s + self.price_s


@dataclass(frozen=True, slots=True)
class Decision:
    """Way in which a turn is served, and where."""

    how: How
    node: NodeName
    terms: Terms = field(default=Terms(), compare=False)
    ship: Ship | None = None  # for a move: the transfer that comes first
    agent: AgentId | None = None  # for a move: the agent that is moved
    loan: HeadLoan | None = None  # offer from which the node may fetch a part of the prompt
    carried_bytes: int = field(default=0, compare=False)  # size of the fetched part
    gain_s: float = field(default=0.0, compare=False)  # for a move: seconds saved by it

    @property
    def source(self) -> NodeName | None:
        """Node that sends the agent's cache or a part of the prompt, if one does."""
        if self.ship is not None:
            return self.ship.source
        return self.loan.source if self.loan is not None else None

    @property
    def is_cold(self) -> bool:
        """Whether the node has nothing of the prompt stored itself."""
        return self.how in (How.FETCH, How.RECOMPUTE)
