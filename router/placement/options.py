"""The ways to serve a turn, each with its terms in seconds. Pure.

its agent has a node     stay there; or move the idle agent to each other one first
it has none              load or recompute on each node that takes new agents
stay, load, recompute    the same with a beginning that another node sends
"""

import heapq
from collections.abc import Container, Sequence
from dataclasses import dataclass

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.ids import NodeName
from fabric.limits import BLOCK_TOKENS
from router.limits import MOVE_TARGETS_MAX
from router.placement.agent_moves import moves_of, stored_size_bytes
from router.placement.decision import How, TurnFacts
from router.placement.head_lenders import fetches_of
from router.placement.seconds import (
    DECODE_TOKENS_EXPECTED,
    REUSE_CHANCE,
    Job,
    NodeCandidate,
    Option,
    assumed_rates,
    coming_s,
    load_s,
    prefill_s,
    terms_of,
    with_shares,
)
from router.placement.sketch_index import HeadState
from router.placement.snapshot import FleetSnapshot, HolderRole, NodeSnapshot, PrefixHolder


def options_of(
    turn: TurnFacts, fleet: FleetSnapshot, serving: NodeName | None, kept: NodeName | None = None
) -> list[Option]:
    """Return the ways to serve a turn whose agent is on the node `serving`, if it is on one.

    The first one is to stay there. The node with the last copy of an agent, `kept`, may
    take it even while it drains: the drain moves the agent away with its memory then.
    """
    if serving is None:
        return _begin(turn, fleet, kept)
    home, owner = fleet.nodes[serving], fleet.owner
    is_known = owner is not None and owner.node == serving and owner.view is not None
    may_move = fleet.is_idle and home.is_alive and is_known
    others = _least_busy(turn, fleet, serving) if may_move else []
    owner_node, *candidates = _candidates(turn, fleet, [home, *others], serving)
    job = Job(turn.prompt_tokens, turn.completion_tokens_max)
    stay = Option(How.STAY, owner_node, terms_of(job, owner_node))
    return [stay, *fetches_of(turn, job, fleet, [stay]), *moves_of(job, fleet, stay, candidates)]


def _begin(turn: TurnFacts, fleet: FleetSnapshot, kept: NodeName | None) -> list[Option]:
    """Return the ways to begin on the nodes that take new agents."""
    # A node that missed an erasure would bring the erased context back.
    erased = {h.node for h in fleet.holders if h.role is HolderRole.ERASED}
    nodes = _eligible(turn, fleet, kept, erased)
    if not nodes:
        return []
    candidates = with_shares(_candidates(turn, fleet, nodes), kept, fleet.totals)
    is_calm = not any(node.active for node in candidates)
    if fleet.totals is not None:
        is_calm = is_calm and fleet.totals.is_calm
    job = Job(turn.prompt_tokens, turn.completion_tokens_max, is_calm)
    options = [
        Option(How.LOAD if node.cached_tokens else How.RECOMPUTE, node, terms_of(job, node))
        for node in candidates
    ]
    return [*options, *fetches_of(turn, job, fleet, options)]


def _eligible(
    turn: TurnFacts, fleet: FleetSnapshot, kept: NodeName | None, erased: Container[NodeName]
) -> list[NodeSnapshot]:
    return [
        node
        for node in fleet.nodes.values()
        if node.is_ready or (node.is_draining and node.name == kept)
        if node.view.model == turn.model
        if node.name not in turn.given_up | turn.full and node.name not in erased
    ]


def _least_busy(turn: TurnFacts, fleet: FleetSnapshot, serving: NodeName) -> list[NodeSnapshot]:
    """Return the other ready nodes, of many those with a copy or the least load."""
    copies = {holder.node for holder in fleet.holders if holder.role is HolderRole.COPY}

    def order(node: NodeSnapshot) -> tuple[bool, float, int, float, NodeName]:
        speed, name = node.view.prefill_tokens_per_s, node.name
        return name not in copies, node.queue_s(fleet.now_s), node.turns, -speed, name

    refused = turn.given_up | turn.full | {serving}
    eligible = [node for name, node in fleet.nodes.items() if node.is_ready and name not in refused]
    return heapq.nsmallest(MOVE_TARGETS_MAX, eligible, key=order)


@dataclass(frozen=True, slots=True)
class _Held:
    """Part of a prompt that a node has."""

    tokens: int = 0
    resident_tokens: int = 0  # of these, in its memory
    stored_bytes: float = 0.0  # to be read from its disk
    is_coming: bool = False  # it is about to compute them


_NOTHING = _Held()


def _held_parts(
    turn: TurnFacts, fleet: FleetSnapshot, serving: NodeName | None
) -> dict[NodeName, _Held]:
    """Return the part of a prompt that each node has; the agent's node has its whole context."""
    parts: dict[NodeName, _Held] = {}
    for prefix in fleet.prefixes:
        node = fleet.nodes.get(prefix.node)
        # Tokens that a node is about to borrow are counted with the loan of each turn.
        if node is not None and prefix.state is not HeadState.BORROWED:
            parts[prefix.node] = _held_prefix(turn, prefix, node.view.bytes_per_token)
    owner = fleet.owner
    if owner is not None and owner.node == serving and owner.view is not None:
        tokens = parts[serving].tokens if serving in parts else 0
        tokens = tokens or min(owner.view.tokens, turn.prompt_tokens)
        is_hot = "hot" in owner.view.tiers
        stored_bytes = 0.0 if is_hot else stored_size_bytes(owner.view)
        parts[serving] = _Held(tokens, tokens if is_hot else 0, stored_bytes)
    return parts


def _held_prefix(turn: TurnFacts, prefix: PrefixHolder, bytes_per_token: int) -> _Held:
    tokens = round(prefix.share * turn.prompt_tokens)
    is_own = prefix.agent is not None and turn.agent in (None, prefix.agent)
    if not is_own:
        tokens -= tokens % BLOCK_TOKENS  # others' caches are shared by whole blocks
    if prefix.state is HeadState.COMING:
        return _Held(tokens, is_coming=True)
    if prefix.is_resident:
        return _Held(tokens, tokens)
    return _Held(tokens, 0, tokens * bytes_per_token if prefix.agent is not None else 0.0)


def _candidates(
    turn: TurnFacts,
    fleet: FleetSnapshot,
    nodes: Sequence[NodeSnapshot],
    serving: NodeName | None = None,
) -> list[NodeCandidate]:
    held = _held_parts(turn, fleet, serving)
    has = [held.get(node.name, _NOTHING) for node in nodes]
    middle = turn.prompt_tokens / 2
    pairs = list(zip(nodes, has, strict=True))
    prefill = [node.prefill_tokens_per_s(middle + of.tokens / 2) for node, of in pairs]
    decode = [node.decode_tokens_per_s for node in nodes]
    if fleet.totals is not None:
        prefill = [speed or fleet.totals.prefill_mean for speed in prefill]
        decode = [speed or fleet.totals.decode_mean for speed in decode]
    prefill, decode = assumed_rates(prefill, PREFILL_TOKENS_PER_S), assumed_rates(decode, 0.0)
    work = turn.prompt_tokens + min(turn.completion_tokens_max, DECODE_TOKENS_EXPECTED)
    return [
        _candidate(fleet, node, of, work, *rates)
        for (node, of), *rates in zip(pairs, prefill, decode, strict=True)
    ]


def _candidate(
    fleet: FleetSnapshot,
    node: NodeSnapshot,
    held: _Held,
    work_tokens: int,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
) -> NodeCandidate:
    queue_s, disk_bytes_per_s = node.queue_s(fleet.now_s), node.disk_bytes_per_s
    evicted_bytes = node.evicted_bytes(work_tokens - held.resident_tokens)
    until_s = 0.0
    if held.is_coming:
        lead_s = prefill_s(held.tokens, prefill_tokens_per_s)
        until_s = coming_s(queue_s, node.prompts_s, lead_s)
    return NodeCandidate(
        name=node.name,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
        queue_s=queue_s,
        prompts_s=node.prompts_s,
        active=node.turns,
        cached_tokens=held.tokens,
        coming_s=until_s,
        load_s=load_s(held.stored_bytes, disk_bytes_per_s),
        evict_s=REUSE_CHANCE * load_s(evicted_bytes, disk_bytes_per_s),
        slowness=node.slowness,
        held_tokens=node.held_tokens,
        agents=node.agents,
        cold_order=node.cold_order,
        turn_order=node.turn_order,
    )
