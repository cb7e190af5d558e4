"""Moves of an agent: which node it can move to, and whether its next turn is worth one. Pure.

An agent that must leave its node goes where it costs least, in seconds:

    C(i) = travel_i + reload_i + turn_i
    travel_i   bytes that i lacks ÷ link rate
    reload_i   loading from disk at each turn, if i's memory has no room for it
    turn_i     queue, one typical message and one typical answer at i's speed

An idle agent may move to serve its next turn sooner:

    move     travel_i + wait_i then + load_i + tail/P_i + delay_i + evict_i + price

Its bytes travel while the target's queue gets shorter. The price covers the commit and keeps agents
from moving for rough estimates: for one that moved a moment ago, or where many move, it is higher,
and speeds that are about equal count as equal. The terms of both are those that place turns
(`router.placement.seconds`).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fabric.assumed_speeds import DECODE_TOKENS_PER_S, PREFILL_TOKENS_PER_S
from fabric.control.node_calls import AgentView
from router.placement.decision import How, Ship
from router.placement.link_rates import rate
from router.placement.seconds import (
    SHIP_START_S,
    STICKINESS_S,
    Job,
    NodeCandidate,
    Option,
    decode_s,
    load_s,
    prefill_s,
    ship_s,
    terms_of,
    tie_limit_s,
)
from router.placement.snapshot import FleetSnapshot, HolderRole, NodeSnapshot

MESSAGE_TOKENS: Final = 512
ANSWER_TOKENS: Final = 256
COMMIT_S: Final = 0.1  # seal, commit and release of a move
MOVE_S_MIN: Final = COMMIT_S + STICKINESS_S + SHIP_START_S  # least cost of a move, with its price
NOISE_RATIO: Final = 1.25  # of measured speeds that count as equal
RECENT_MOVE_FACTOR: Final = 3.0  # of the price, for an agent that moved a moment ago


def routes(fleet: FleetSnapshot) -> list[Ship]:
    """Return the transfers from an agent's owner to nodes that may take it, the fastest first."""
    owner = fleet.owner
    home = fleet.nodes.get(owner.node) if owner is not None else None
    if owner is None or home is None:
        return []
    copies = {h.node: h.view for h in fleet.holders if h.role is HolderRole.COPY}
    ships: list[Ship] = []
    for node in fleet.nodes.values():
        if node.name != home.name and _may_take(node, home):
            missing = missing_bytes(owner.view, copies.get(node.name))
            bytes_per_s = rate(home.view, node.view)
            ahead_bytes = max(home.leaving_bytes, node.coming_bytes)
            travel_s = ship_s(missing, bytes_per_s) + ahead_bytes / bytes_per_s
            ships.append(Ship(home.name, node.name, missing, travel_s))
    held_tokens = {ship: fleet.nodes[ship.target].held_tokens for ship in ships}
    return sorted(ships, key=lambda ship: (ship.travel_s, held_tokens[ship], ship.target))


def destination(fleet: FleetSnapshot) -> Ship | None:
    """Return the cheapest transfer to a node whose disk has room; None if there is none.

    Among estimates that count as equal, the node with most of the agent wins, then the node with
    the fewest tokens of others.
    """
    owner_view = fleet.owner.view if fleet.owner is not None else None
    agent_bytes = stored_size_bytes(owner_view) if owner_view is not None else 0
    ships = [ship for ship in routes(fleet) if fits(ship, fleet.nodes[ship.target])]
    costs = {
        ship: cost_s(ship, fleet.nodes[ship.target], agent_bytes, fleet.now_s) for ship in ships
    }
    if not costs:
        return None
    limit_s = tie_limit_s(min(costs.values()))
    cheapest = [ship for ship in ships if costs[ship] <= limit_s]
    held_tokens = {ship: fleet.nodes[ship.target].held_tokens for ship in cheapest}
    return min(cheapest, key=lambda ship: (ship.missing_bytes, held_tokens[ship], ship.target))


def cost_s(ship: Ship, node: NodeSnapshot, agent_bytes: int, now_s: float = 0.0) -> float:
    """Estimate the cost of a move and a turn on the target for an agent of `agent_bytes`."""
    view = node.view
    is_roomy = view.free is None or view.free.hot - node.coming_bytes >= agent_bytes
    reload_s = 0.0 if is_roomy else load_s(agent_bytes)
    message_s = prefill_s(MESSAGE_TOKENS, view.prefill_tokens_per_s or PREFILL_TOKENS_PER_S)
    answer_speed = view.decode_tokens_per_s or DECODE_TOKENS_PER_S
    answer_s = decode_s(ANSWER_TOKENS, answer_speed, node.turns)
    return ship.travel_s + reload_s + node.queue_s(now_s) + message_s + answer_s


def fits(ship: Ship, node: NodeSnapshot) -> bool:
    """Return whether a node's disk has room for the agent."""
    free = node.view.free
    return free is None or free.disk - node.coming_bytes >= ship.missing_bytes


def _may_take(node: NodeSnapshot, home: NodeSnapshot) -> bool:
    view = node.view
    # Nodes refuse each other's blocks if either the model or the protocol differs.
    is_alike = (view.fingerprint, view.protocol) == (home.view.fingerprint, home.view.protocol)
    return node.is_ready and is_alike and view.reuse and view.degraded is None


def missing_bytes(agent: AgentView | None, held: AgentView | None) -> int:
    """Estimate the bytes that a node with an older copy lacks."""
    if agent is None or agent.tokens <= 0:
        return 0
    shared_tokens = min(held.tokens, agent.tokens) if held is not None else 0
    share = 1.0 - shared_tokens / agent.tokens
    return round(share * stored_size_bytes(agent))


def stored_size_bytes(agent: AgentView) -> int:
    """Return the bytes of an agent's cache on disk, once all of it is there."""
    return max(agent.bytes.disk, agent.bytes.hot)


def moves_of(
    job: Job, fleet: FleetSnapshot, stay: Option, others: Iterable[NodeCandidate]
) -> list[Option]:
    """Return the moves to other nodes that may take the agent, each with what the owner has."""
    by_name = {node.name: node for node in others}
    if not by_name:
        return []
    home, price_s = stay.node, price_of(stay, fleet)
    view = fleet.owner.view if fleet.owner is not None else None
    stored_bytes = stored_size_bytes(view) if view is not None else 0
    weighed = {name: fleet.nodes[name] for name in (home.name, *by_name)}
    moves: list[Option] = []
    for ship in routes(replace(fleet, nodes=weighed)):
        if not fits(ship, weighed[ship.target]):
            continue
        node = by_name[ship.target]
        moved = replace(
            node,
            cached_tokens=home.cached_tokens,
            load_s=load_s(stored_bytes, weighed[ship.target].disk_bytes_per_s),
            prefill_tokens_per_s=_beyond_noise(
                node.prefill_tokens_per_s, home.prefill_tokens_per_s
            ),
            decode_tokens_per_s=_beyond_noise(node.decode_tokens_per_s, home.decode_tokens_per_s),
        )
        terms = terms_of(job, moved, travel_s=ship.travel_s, price_s=price_s)
        moves.append(Option(How.MOVE, moved, terms, ship=ship))
    return moves


def price_of(stay: Option, fleet: FleetSnapshot) -> float:
    """Return by how many seconds a move must serve the turn sooner than its owner would."""
    felt_s = stay.terms.felt_s
    price_s = COMMIT_S + tie_limit_s(felt_s) - felt_s
    return price_s * fleet.move_price * (RECENT_MOVE_FACTOR if fleet.moved_lately else 1.0)


def _beyond_noise(speed: float, reference: float) -> float:
    """Return a measured speed, or the reference if they are about equal: measures are rough."""
    if speed <= 0 or reference <= 0:
        return reference
    is_near = 1 / NOISE_RATIO < speed / reference < NOISE_RATIO
    return reference if is_near else speed
