"""What is to be placed, and where it is to go."""

from dataclasses import dataclass

from fabric.ids import AgentId, NodeName


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """A turn, as far as its place depends on it."""

    model: str
    prompt_tokens: int
    completion_tokens_max: int
    home_seed: str  # picks the same node for conversations that leave no other trace
    agent: AgentId | None = None  # that it names
    group: AgentId | None = None  # the weaker name that it gives instead
    given_up: frozenset[NodeName] = frozenset()  # nodes that it was tried on in vain


@dataclass(frozen=True, slots=True)
class Stay:
    """Serve the turn where its agent, or its conversation, lives."""

    node: NodeName


@dataclass(frozen=True, slots=True)
class Load:
    """Begin there, with what that node holds of the prompt; the rest takes `prefill_s`."""

    node: NodeName
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Recompute:
    """Begin there, with nothing."""

    node: NodeName
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Ship:
    """Send an agent's cache from its owner to another node."""

    source: NodeName
    target: NodeName
    missing_bytes: int  # that the target has no copy of
    travel_s: float
