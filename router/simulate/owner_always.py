"""Placement of this router before turns moved agents: an agent's owner serves all its turns.

    owner lives ──▶ the owner, however long its queue; such a turn is booked with no work
    else        ──▶ the least C(i) = booked_i + min(U/P_i, load_i + U_c/P_i) + answer_i
                    + (i has its share of agents) · (U/P_i + answer_i)

Only prompts of new agents are booked; the queues that nodes report are not used. Its nodes
neither wait for a beginning that another turn computes, nor lend one to each other
(`router.simulate.catalog`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from fabric.assumed_speeds import DECODE_TOKENS_PER_S, DISK_BYTES_PER_S, PREFILL_TOKENS_PER_S
from fabric.errors import RetryLaterError
from fabric.limits import BLOCK_TOKENS
from router.placement.decision import Decision, How, Terms, TurnFacts
from router.placement.placement import Placement
from router.placement.seconds import (
    DECODE_TOKENS_EXPECTED,
    SHARE_SLACK,
    answer_factor,
    class_weight,
    prefill_s,
    tie_limit_s,
)
from router.placement.snapshot import FleetSnapshot, HolderRole, NodeSnapshot

SHARE_S: Final = 0.3  # the least that a node with its share of agents costs more
SERVING: Final = (HolderRole.STARTING, HolderRole.OWNER, HolderRole.RELEASED)
AGAIN_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Costs:
    """Cost of a new agent's turn on a node."""

    node: NodeSnapshot
    cached_tokens: int
    prompt_s: float
    whole_s: float
    fill: float  # agents for its class of speed


class OwnerAlways(Placement):
    """Placement of new agents in seconds, and of all other turns on the agent's owner."""

    @property
    def compares_all(self) -> bool:
        """Whether it needs all nodes of a fleet: it has no narrower choice."""
        return True

    def decide(self, turn: TurnFacts, fleet: FleetSnapshot) -> Decision:
        """Return the node of a turn; raise RetryLaterError if none can serve it."""
        for holder in fleet.holders:
            node = fleet.nodes.get(holder.node)
            is_reachable = node is not None and (node.is_up or node.is_returning)
            if is_reachable and holder.role in SERVING and holder.node not in turn.given_up:
                return Decision(How.STAY, holder.node)
        ready = (node for node in fleet.nodes.values() if node.is_ready)
        nodes = [n for n in ready if n.view.model == turn.model and n.name not in turn.given_up]
        if not nodes:
            message = "no node is ready to serve this model"
            raise RetryLaterError(message, retry_after_s=AGAIN_S, code="no_node_ready")
        costs = _costs(turn, fleet, nodes)
        limit_s = tie_limit_s(min(each.whole_s for each in costs))
        about_equal = [each for each in costs if each.whole_s <= limit_s]
        copies = {held.node for held in fleet.holders if held.role is HolderRole.COPY}
        kept = (each for each in about_equal if each.node.name in copies)
        best = next(kept, None) or min(about_equal, key=_spread)
        how = How.LOAD if best.cached_tokens else How.RECOMPUTE
        return Decision(how, best.node.name, Terms(prefill_s=best.prompt_s))


def _spread(costs: _Costs) -> tuple[float, int, int, str]:
    node = costs.node
    return costs.fill, node.cold_order, node.held_tokens, node.name


def _costs(turn: TurnFacts, fleet: FleetSnapshot, nodes: Sequence[NodeSnapshot]) -> list[_Costs]:
    middle = median(_speed(node) for node in nodes)
    weights = [class_weight(_speed(node) / middle) for node in nodes]
    agents = sum(node.agents for node in nodes)
    share = SHARE_SLACK * (agents + 1) / sum(weights)
    prefixes = {prefix.node: prefix for prefix in fleet.prefixes}
    costs: list[_Costs] = []
    for node, weight in zip(nodes, weights, strict=True):
        prefix, speed = prefixes.get(node.name), _speed(node)
        cached = round(prefix.share * turn.prompt_tokens) if prefix is not None else 0
        cached -= cached % BLOCK_TOKENS
        anew_s = prefill_s(turn.prompt_tokens, speed)
        rest_s = prefill_s(turn.prompt_tokens - cached, speed)
        is_cold = prefix is not None and prefix.agent is not None and not prefix.is_resident
        load_s = cached * node.view.bytes_per_token / DISK_BYTES_PER_S if is_cold else 0.0
        answer_s = _answer_s(turn, node)
        is_over = node.agents + 1 > max(1, round(share * weight))
        share_s = max(SHARE_S, anew_s + answer_s) if is_over else 0.0
        whole_s = node.promised_s + min(anew_s, load_s + rest_s) + answer_s + share_s
        costs.append(_Costs(node, cached, rest_s, whole_s, node.agents / weight))
    return costs


def _answer_s(turn: TurnFacts, node: NodeSnapshot) -> float:
    tokens = min(turn.completion_tokens_max, DECODE_TOKENS_EXPECTED)
    speed = node.view.decode_tokens_per_s or DECODE_TOKENS_PER_S
    return tokens / speed * answer_factor(node.turns)


def _speed(node: NodeSnapshot) -> float:
    return node.view.prefill_tokens_per_s or PREFILL_TOKENS_PER_S
