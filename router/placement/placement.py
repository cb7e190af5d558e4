"""Placement of turns: `options` lists the ways to serve one, and `choice` chooses.

    its agent's node    named: that of its first turn, else its owner, else none
                        unnamed: the owner of the conversation that it continues, else none
    preferred           of equals, without such a node: the last copy's, the group's, or a home

Pure: a decision depends on its arguments alone.
"""

import math
from collections.abc import Sequence

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.errors import RetryLaterError
from fabric.ids import NodeName
from router.placement.agent_moves import MOVE_S_MIN
from router.placement.candidates import text_hash
from router.placement.choice import Policy, choose
from router.placement.decision import Decision, How, TurnFacts
from router.placement.options import options_of
from router.placement.seconds import prefill_s
from router.placement.snapshot import FleetSnapshot, HolderRole

SERVING = (HolderRole.STARTING, HolderRole.OWNER, HolderRole.RELEASED)


class Placement:
    """Placement by one policy; equal arguments always give equal decisions."""

    def __init__(self, policy: Policy = Policy.SECONDS) -> None:
        self._policy = policy

    @property
    def compares_all(self) -> bool:
        """Whether it needs all nodes of a large fleet, not the few that may be the cheapest."""
        return self._policy is not Policy.SECONDS

    def weighs_moves(self, turn: TurnFacts, decision: Decision) -> bool:
        """Return whether a move of the turn's agent might be better than this decision."""
        if decision.how is not How.STAY:
            return False
        is_late = decision.terms.felt_s > MOVE_S_MIN
        return is_late or decision.node in turn.full or self._policy is not Policy.SECONDS

    def decide(self, turn: TurnFacts, fleet: FleetSnapshot) -> Decision:
        """Return the node that serves a turn, and how; raise RetryLaterError if none can.

        A node that is up keeps its agents, and one that is starting again gets time to return.
        """
        # The baselines place every unnamed turn.
        has_node = turn.agent is not None or self._policy is Policy.SECONDS
        serving = _serving(turn, fleet) if has_node else None
        options = options_of(turn, fleet, serving, _copy(turn, fleet))
        if not options:
            message = "no node is ready to serve this model"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        home = _home(turn, fleet) if serving is None else None
        chosen = choose(options, home, self._policy, turn.full)
        is_move = chosen.ship is not None
        return Decision(
            chosen.how,
            chosen.node.name,
            chosen.terms,
            ship=chosen.ship,
            agent=fleet.agent if is_move else None,
            loan=chosen.loan,
            carried_bytes=chosen.carried_bytes,
            gain_s=options[0].terms.felt_s - chosen.terms.felt_s if is_move else 0.0,
        )


def recompute_s(turn: TurnFacts, fleet: FleetSnapshot) -> float:
    """Estimate how soon a remaining node has computed a prompt, less what replicas have cached."""
    nodes = [n for n in fleet.nodes.values() if n.is_ready and n.name not in turn.given_up]
    if not nodes:
        return math.inf
    names = {node.name for node in nodes}
    replicas = [p for p in fleet.prefixes if turn.agent and p.agent == turn.agent]
    share = max((replica.share for replica in replicas if replica.node in names), default=0.0)
    fastest = max(node.view.prefill_tokens_per_s for node in nodes) or PREFILL_TOKENS_PER_S
    rest_tokens = (1.0 - share) * turn.prompt_tokens
    speeds = [(node, node.view.prefill_tokens_per_s or fastest) for node in nodes]
    return min(node.queue_s(fleet.now_s) + prefill_s(rest_tokens, rate) for node, rate in speeds)


def is_continued(turn: TurnFacts, fleet: FleetSnapshot) -> bool:
    """Return whether a node that is up owns the conversation that an unnamed turn continues."""
    return _continued_owner(turn, fleet) is not None


def _serving(turn: TurnFacts, fleet: FleetSnapshot) -> NodeName | None:
    """Return the node that has the turn's agent, named or found by its content."""
    if turn.agent is None:
        return _continued_owner(turn, fleet)
    return _holder(turn, fleet, SERVING)


def _copy(turn: TurnFacts, fleet: FleetSnapshot) -> NodeName | None:
    """Return the node with the latest copy of a named agent."""
    return _holder(turn, fleet, (HolderRole.COPY,)) if turn.agent is not None else None


def _holder(turn: TurnFacts, fleet: FleetSnapshot, roles: Sequence[HolderRole]) -> NodeName | None:
    """Return the first holder with one of the roles that is up, or starting again."""
    for holder in fleet.holders:
        node = fleet.nodes.get(holder.node)
        is_reachable = node is not None and (node.is_up or node.is_returning)
        if is_reachable and holder.role in roles and holder.node not in turn.given_up:
            return holder.node
    return None


def _continued_owner(turn: TurnFacts, fleet: FleetSnapshot) -> NodeName | None:
    """Return the owner of the conversation that an unnamed turn continues, if known."""
    owners = [p.node for p in fleet.prefixes if p.agent and not p.is_replica]
    return _first_up(turn, fleet, owners)


def _home(turn: TurnFacts, fleet: FleetSnapshot) -> NodeName | None:
    """Return the node that is preferred for an agent without an owner."""
    if turn.agent is not None:
        return _copy(turn, fleet)
    preferred = [
        prefix.node
        for prefix in fleet.prefixes
        if prefix.agent and turn.group in (None, prefix.group)  # without a group: any
    ]
    return _first_up(turn, fleet, [*preferred, *fleet.group_nodes]) or _hashed_home(turn, fleet)


def _first_up(turn: TurnFacts, fleet: FleetSnapshot, names: Sequence[NodeName]) -> NodeName | None:
    for name in names:
        node = fleet.nodes.get(name)
        if node is None or node.view.model != turn.model:
            continue
        if node.is_up and name not in turn.given_up:
            return name
    return None


def _hashed_home(turn: TurnFacts, fleet: FleetSnapshot) -> NodeName | None:
    # Prompts shorter than a sketch piece have no sketch: their opening chooses the node.
    if fleet.home is not None:
        return fleet.home
    names = [
        node.name
        for node in fleet.nodes.values()
        if node.is_ready and node.view.model == turn.model and node.name not in turn.given_up
    ]
    return max(names, key=lambda name: text_hash(f"{turn.home_seed}:{name}"), default=None)
