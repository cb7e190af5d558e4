"""Placement of turns: on the node that has the agent, else on the cheapest in seconds.

    named     node of its first turn ─▶ its owner ─▶ the cheapest, counting replicas
    unnamed   owner of the conversation it continues ─▶ the cheapest; of equals, its group's or home

An idle agent is moved from its owner where that serves the turn sooner (`agent_moves`).

Pure: a decision depends on its arguments alone.
"""

import heapq
import math
from collections.abc import Container, Sequence

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.errors import RetryLaterError
from fabric.ids import NodeName
from fabric.limits import BLOCK_TOKENS
from router.limits import MOVE_TARGETS_MAX
from router.placement.agent_moves import cheaper_move, move_to, with_memory
from router.placement.candidates import text_hash
from router.placement.decision import Decision, Load, MoveAgent, Recompute, Stay, TurnFacts
from router.placement.seconds import (
    DECODE_TOKENS_EXPECTED,
    REUSE_CHANCE,
    Job,
    NodeCandidate,
    Policy,
    assumed_rates,
    load_s,
    place,
    prefill_s,
    terms_of,
    whole_cost_s,
    with_shares,
)
from router.placement.snapshot import FleetSnapshot, HolderRole, NodeSnapshot, PrefixHolder

SERVING = (HolderRole.STARTING, HolderRole.OWNER, HolderRole.RELEASED)


class Placement:
    """Placement by one policy; equal arguments always give equal decisions."""

    def __init__(self, policy: Policy = Policy.SECONDS) -> None:
        self._policy = policy

    @property
    def compares_all(self) -> bool:
        """Whether it needs all nodes of a large fleet, not the few that may be the cheapest."""
        return self._policy is not Policy.SECONDS

    def decide(self, turn: TurnFacts, fleet: FleetSnapshot) -> Decision:
        """Return the node that serves a turn; raise RetryLaterError if none can.

        A node that is up keeps its agents, and one that is starting again gets time to return.
        """
        if turn.agent is not None:
            serving = _holder(turn, fleet, SERVING)
            latest_copy = _holder(turn, fleet, (HolderRole.COPY,))
            if serving is not None:
                return self._stay_or_move(turn, fleet, serving)
            return self._begin(turn, fleet, latest_copy)
        # The baselines place every unnamed turn.
        continued = _continued(turn, fleet) if self._policy is Policy.SECONDS else None
        if continued is not None:
            return self._stay_or_move(turn, fleet, continued)
        return self._begin(turn, fleet, _home(turn, fleet))

    def _stay_or_move(
        self, turn: TurnFacts, fleet: FleetSnapshot, serving: NodeName
    ) -> Stay | MoveAgent:
        """Serve the turn on the agent's node, or on another one once it was moved there."""
        home, owner = fleet.nodes[serving], fleet.owner
        may_move = fleet.is_idle and home.is_alive and owner is not None and owner.node == serving
        others = _least_busy(turn, fleet, serving) if may_move else []
        candidates = _candidates(turn, fleet, [home, *others])
        job = Job(turn.prompt_tokens, turn.completion_tokens_max)
        terms = terms_of(job, candidates[0])
        stay = Stay(serving, terms.prefill_s, terms)
        options = with_memory(turn, fleet, candidates) if may_move else []
        if self._policy is Policy.SECONDS:
            return cheaper_move(turn, fleet, options) or stay
        if not options or fleet.agent is None:
            return stay
        chosen = place(job, [node for node, _ in options], self._policy)
        ship = next(ship for node, ship in options if node is chosen)
        return stay if ship is None else move_to(turn, fleet.agent, chosen, ship)

    def _begin(
        self, turn: TurnFacts, fleet: FleetSnapshot, home: NodeName | None
    ) -> Load | Recompute:
        """Choose among the nodes that take new agents.

        The `home` of a named agent takes it even while draining: once the agent has an owner
        again, the drain moves it away with its memory.
        """
        # The home of an unnamed turn is a preference, not a node with a copy of the agent.
        kept = home if turn.agent is not None else None
        # A node that missed an erasure would bring the erased context back.
        erased = {h.node for h in fleet.holders if h.role is HolderRole.ERASED}
        nodes = _eligible(turn, fleet, kept, erased)
        if not nodes:
            message = "no node is ready to serve this model"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        candidates = with_shares(_candidates(turn, fleet, nodes), kept, fleet.totals)
        job = _job(turn, fleet, candidates, home)
        chosen = place(job, candidates, self._policy)
        terms = terms_of(job, chosen)
        kind = Load if chosen.cached_tokens else Recompute
        return kind(chosen.name, terms.prefill_s, terms)


def candidate_costs(turn: TurnFacts, fleet: FleetSnapshot) -> dict[NodeName, float]:
    """Return the seconds that each node costs which may start a turn's agent."""
    nodes = _eligible(turn, fleet, None, frozenset())
    candidates = with_shares(_candidates(turn, fleet, nodes), None, fleet.totals)
    job = _job(turn, fleet, candidates, None)
    return {node.name: whole_cost_s(job, node) for node in candidates}


def _job(
    turn: TurnFacts,
    fleet: FleetSnapshot,
    candidates: Sequence[NodeCandidate],
    home: NodeName | None,
) -> Job:
    is_calm = not any(node.active for node in candidates)
    if fleet.totals is not None:
        is_calm = is_calm and fleet.totals.is_calm
    return Job(turn.prompt_tokens, turn.completion_tokens_max, home, is_calm)


def _eligible(
    turn: TurnFacts, fleet: FleetSnapshot, kept: NodeName | None, erased: Container[NodeName]
) -> list[NodeSnapshot]:
    return [
        node
        for node in fleet.nodes.values()
        if node.is_ready or (node.is_draining and node.name == kept)
        if node.view.model == turn.model
        if node.name not in turn.given_up and node.name not in erased
    ]


def recompute_s(turn: TurnFacts, fleet: FleetSnapshot) -> float:
    """Estimate the prefill of a prompt on the remaining nodes, less what replicas have cached."""
    nodes = [n for n in fleet.nodes.values() if n.is_ready and n.name not in turn.given_up]
    if not nodes:
        return math.inf
    names = {node.name for node in nodes}
    replicas = [p for p in fleet.prefixes if turn.agent and p.agent == turn.agent]
    share = max((replica.share for replica in replicas if replica.node in names), default=0.0)
    fastest = max(node.view.prefill_tokens_per_s for node in nodes) or PREFILL_TOKENS_PER_S
    return prefill_s((1.0 - share) * turn.prompt_tokens, fastest)


def is_continued(turn: TurnFacts, fleet: FleetSnapshot) -> bool:
    """Return whether a node that is up owns the conversation that an unnamed turn continues."""
    return _continued(turn, fleet) is not None


def _holder(turn: TurnFacts, fleet: FleetSnapshot, roles: Sequence[HolderRole]) -> NodeName | None:
    """Return the first holder with one of the roles that is up, or starting again."""
    for holder in fleet.holders:
        node = fleet.nodes.get(holder.node)
        is_reachable = node is not None and (node.is_up or node.is_returning)
        if is_reachable and holder.role in roles and holder.node not in turn.given_up:
            return holder.node
    return None


def _continued(turn: TurnFacts, fleet: FleetSnapshot) -> NodeName | None:
    """Return the owner of the conversation that an unnamed turn continues, if known."""
    owners = [p.node for p in fleet.prefixes if p.agent and not p.is_replica]
    return _first_up(turn, fleet, owners)


def _home(turn: TurnFacts, fleet: FleetSnapshot) -> NodeName | None:
    """Return the preferred node of an unnamed conversation without a known owner."""
    known = [
        prefix.node
        for prefix in fleet.prefixes
        if prefix.agent and turn.group in (None, prefix.group)  # without a group: any
    ]
    return _first_up(turn, fleet, [*known, *fleet.group_nodes]) or _hashed_home(turn, fleet)


def _least_busy(turn: TurnFacts, fleet: FleetSnapshot, serving: NodeName) -> list[NodeSnapshot]:
    """Return the other ready nodes, of many those with the least load."""

    def order(node: NodeSnapshot) -> tuple[float, int, float, NodeName]:
        return node.queue_s(fleet.now_s), node.turns, -node.view.prefill_tokens_per_s, node.name

    nodes = (node for node in fleet.nodes.values() if node.is_ready and node.name != serving)
    eligible = (node for node in nodes if node.name not in turn.given_up)
    return heapq.nsmallest(MOVE_TARGETS_MAX, eligible, key=order)


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


def _candidates(
    turn: TurnFacts, fleet: FleetSnapshot, nodes: Sequence[NodeSnapshot]
) -> list[NodeCandidate]:
    position = turn.prompt_tokens / 2
    prefill = [node.prefill_tokens_per_s(position) for node in nodes]
    decode = [node.decode_tokens_per_s for node in nodes]
    if fleet.totals is not None:
        prefill = [speed or fleet.totals.prefill_mean for speed in prefill]
        decode = [speed or fleet.totals.decode_mean for speed in decode]
    prefill, decode = assumed_rates(prefill, PREFILL_TOKENS_PER_S), assumed_rates(decode, 0.0)
    prefixes = {prefix.node: prefix for prefix in fleet.prefixes}
    return [
        _candidate(turn, node, prefixes.get(node.name), *rates, now_s=fleet.now_s)
        for node, *rates in zip(nodes, prefill, decode, strict=True)
    ]


def _candidate(
    turn: TurnFacts,
    node: NodeSnapshot,
    prefix: PrefixHolder | None,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
    *,
    now_s: float,
) -> NodeCandidate:
    cached, from_disk_s = 0, 0.0
    if prefix is not None:
        cached = round(prefix.share * turn.prompt_tokens)
        is_own = prefix.agent is not None and turn.agent in (None, prefix.agent)
        if not is_own:
            cached -= cached % BLOCK_TOKENS  # others' caches are shared by whole blocks
        if prefix.agent is not None and not prefix.is_resident:
            from_disk_s = load_s(cached * node.view.bytes_per_token)
    resident = cached if prefix is not None and prefix.is_resident else 0
    answer = min(turn.completion_tokens_max, DECODE_TOKENS_EXPECTED)
    return NodeCandidate(
        name=node.name,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
        queue_s=node.queue_s(now_s),
        prompts_s=node.prompts_s,
        active=node.turns,
        cached_tokens=cached,
        load_s=from_disk_s,
        evict_s=REUSE_CHANCE * load_s(node.evicted_bytes(turn.prompt_tokens - resident + answer)),
        slowness=node.slowness,
        held_tokens=node.held_tokens,
        agents=node.agents,
        cold_order=node.cold_order,
        turn_order=node.turn_order,
    )
