"""Placement by the rules of other systems, to compare with; each also places named agents.

    round-robin   one node after another
    least-load    the node with the fewest seconds of unfinished prompts, then the fewest turns
    sticky        least load for the first turn of an agent, then always its owner
    prefix-only   the node with the longest prefix, then the least load
    no moves      the shipped placement, whose agents stay with their owners
    dynamo        NVIDIA Dynamo's documented linear cost, in blocks (docs/simulate.md)

A baseline moves no memory: a turn that it sends to another node is computed there. Each keeps its
own account of load, so that none depends on what the shipped router books for its own placement.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.errors import RetryLaterError
from fabric.ids import NodeName
from router.placement.decision import Decision, How, Terms, TurnFacts
from router.placement.placement import Placement
from router.placement.seconds import prefill_s
from router.placement.snapshot import FleetSnapshot, HolderRole, NodeSnapshot

DYNAMO_BLOCK_TOKENS: Final = 16
AGAIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class PlacementQuestion:
    """Turn, the nodes that can serve it, its owner, and each node's cached tokens of its prompt."""

    turn: TurnFacts
    nodes: Sequence[NodeSnapshot]
    owner: NodeName | None
    cached: Mapping[NodeName, int]


@dataclass(slots=True)
class _Counted:
    node: NodeName
    prefill_tokens: int
    active_tokens: int


class Baseline(Placement):
    """Placement by one rule; subclasses choose among the nodes that can serve a turn."""

    def __init__(self) -> None:
        super().__init__()
        self._prefill: Counter[NodeName] = Counter()  # tokens of prompts to be computed
        self._active: Counter[NodeName] = Counter()  # tokens of running turns, answers included
        self._turns: Counter[NodeName] = Counter()
        self._last: dict[NodeName, int] = {}
        self._counted: dict[int, _Counted] = {}
        self._decided = _Counted(NodeName(""), 0, 0)

    @property
    def compares_all(self) -> bool:
        """Whether it needs all nodes of a fleet: none of them is left out as too expensive."""
        return True

    def decide(self, turn: TurnFacts, fleet: FleetSnapshot) -> Decision:
        """Return the node of a turn; raise RetryLaterError if none can serve it."""
        owner = _owner(fleet)
        nodes = [
            node
            for node in fleet.nodes.values()
            if node.is_ready or (node.is_draining and node.name == owner)
            if node.view.model == turn.model and node.name not in turn.given_up
        ]
        if not nodes:
            message = "no node is ready to serve this model"
            raise RetryLaterError(message, retry_after_s=AGAIN_S, code="no_node_ready")
        cached = {p.node: round(p.share * turn.prompt_tokens) for p in fleet.prefixes}
        chosen = self.choose(PlacementQuestion(turn, nodes, owner, cached))
        cached_tokens = cached.get(chosen.name, 0)
        missing = turn.prompt_tokens - cached_tokens
        active = turn.prompt_tokens + turn.completion_tokens_max
        self._decided = _Counted(chosen.name, missing, active)
        if chosen.name == owner:
            return Decision(How.STAY, chosen.name)
        how = How.LOAD if cached_tokens else How.RECOMPUTE
        terms = Terms(prefill_s=prefill_s(missing, _speed(chosen)))
        return Decision(how, chosen.name, terms)

    def choose(self, question: PlacementQuestion) -> NodeSnapshot:
        """Choose the node with the least load."""
        return min(question.nodes, key=self.load)

    def load(self, node: NodeSnapshot) -> tuple[float, int, int, str]:
        """Return a node's sort key by load."""
        name = node.name
        unfinished_s = prefill_s(self._prefill[name], _speed(node))
        return (unfinished_s, self._turns[name], self._last.get(name, 0), name)

    def last(self, node: NodeSnapshot) -> int:
        """Return the number of the last turn given to a node; 0 if none was."""
        return self._last.get(node.name, 0)

    # --- the account of load -------------------------------------------------------------------

    def note_start(self, ticket: int, node: NodeName) -> None:
        """Count the turn that was decided last."""
        counted = self._decided
        self._counted[ticket] = counted
        self._prefill[node] += counted.prefill_tokens
        self._active[node] += counted.active_tokens
        self._turns[node] += 1
        self._last[node] = ticket

    def note_first_token(self, ticket: int) -> None:
        """Subtract a turn's prompt at its first token."""
        counted = self._counted.get(ticket)
        if counted is not None:
            self._prefill[counted.node] -= counted.prefill_tokens
            counted.prefill_tokens = 0

    def note_end(self, ticket: int) -> None:
        """Subtract a turn that has ended."""
        self.note_first_token(ticket)
        counted = self._counted.pop(ticket, None)
        if counted is not None:
            self._active[counted.node] -= counted.active_tokens
            self._turns[counted.node] -= 1


def _owner(fleet: FleetSnapshot) -> NodeName | None:
    serving = (HolderRole.STARTING, HolderRole.OWNER)
    return next((holder.node for holder in fleet.holders if holder.role in serving), None)


def _speed(node: NodeSnapshot) -> float:
    return node.view.prefill_tokens_per_s or PREFILL_TOKENS_PER_S


class NoMoves(Placement):
    """The shipped placement, except that no agent is moved for its next turn."""

    def decide(self, turn: TurnFacts, fleet: FleetSnapshot) -> Decision:
        """Return the node of a turn; raise RetryLaterError if none can serve it."""
        return super().decide(turn, replace(fleet, is_idle=False))


class LeastLoad(Baseline):
    """Placement on the node with the least load, regardless of caches."""


class RoundRobin(Baseline):
    """Placement on one node after another."""

    def choose(self, question: PlacementQuestion) -> NodeSnapshot:
        return min(question.nodes, key=lambda node: (self.last(node), node.name))


class Sticky(Baseline):
    """Placement of first turns by load, and of all others on the agent's owner."""

    def choose(self, question: PlacementQuestion) -> NodeSnapshot:
        owner = next((node for node in question.nodes if node.name == question.owner), None)
        return owner or min(question.nodes, key=self.load)


class PrefixOnly(Baseline):
    """Placement on the node with the longest prefix."""

    def choose(self, question: PlacementQuestion) -> NodeSnapshot:
        cached = question.cached
        return min(question.nodes, key=lambda node: (-cached.get(node.name, 0), *self.load(node)))


class DynamoLinear(Baseline):
    """Placement by Dynamo's linear cost: scale · prefill blocks + decode blocks.

    Prefill blocks are those of unfinished prompts and of this one, less what is cached; decode
    blocks those of all running turns and of this one.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def choose(self, question: PlacementQuestion) -> NodeSnapshot:
        incoming = question.turn.prompt_tokens

        def cost(node: NodeSnapshot) -> tuple[float, str]:
            overlap = question.cached.get(node.name, 0)
            prefill = max(0, self._prefill[node.name] + incoming - overlap)
            decode = self._active[node.name] + incoming
            return (self._scale * _blocks(prefill) + _blocks(decode), node.name)

        return min(question.nodes, key=cost)


def _blocks(tokens: int) -> int:
    return -(-tokens // DYNAMO_BLOCK_TOKENS)
