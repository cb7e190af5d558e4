"""Choice of the cheapest node for an agent that must leave its own, in seconds. Pure.

    C(i) = travel_i + reload_i + turn_i
    travel_i   bytes that i lacks ÷ link rate
    reload_i   loading from disk at each turn, if i's memory has no room for it
    turn_i     queue, one typical message and one typical answer at i's speed

The terms are those that place turns (`router.placement.seconds`), with a typical message and answer
instead of those of a request.
"""

from fabric.assumed_speeds import DECODE_TOKENS_PER_S, PREFILL_TOKENS_PER_S
from fabric.control.node_calls import AgentView
from router.placement.decision import Ship
from router.placement.link_rates import rate
from router.placement.seconds import decode_s, load_s, prefill_s, ship_s, tie_limit_s
from router.placement.snapshot import FleetSnapshot, HolderRole, NodeSnapshot

MESSAGE_TOKENS = 512
ANSWER_TOKENS = 256


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
    agent_bytes = max(owner_view.bytes.hot, owner_view.bytes.disk) if owner_view is not None else 0
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
    return round(share * max(agent.bytes.disk, agent.bytes.hot))
