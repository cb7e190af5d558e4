"""Where an agent that must leave its node is best off, in seconds: pure arithmetic.

    C(i) = travel_i + reload_i + turn_i
    travel_i   bytes that i lacks ÷ what the links carry
    reload_i   from disk each turn, where i's memory does not hold it beside the others
    turn_i     the queue, one more message and one more answer at i's speed

The terms are those by which turns are placed (`router.placement.cost`), with a message and an
answer as are usual in place of those of one request.
"""

from fabric.assumed_speeds import DECODE_TOKENS_PER_S, PREFILL_TOKENS_PER_S
from fabric.control.node_calls import AgentView
from router.placement.cost import decode_s, load_s, near_s, prefill_s, ship_s
from router.placement.decision import Ship
from router.placement.link_rates import rate
from router.placement.snapshot import FleetSnapshot, HolderRole, NodeSnapshot

MESSAGE_TOKENS = 512
ANSWER_TOKENS = 256


def ways(fleet: FleetSnapshot) -> list[Ship]:
    """List the ways from an agent's owner to nodes that may take it, the quickest first."""
    owner = fleet.owner
    home = fleet.nodes.get(owner.node) if owner is not None else None
    if owner is None or home is None:
        return []
    copies = {each.node: each.view for each in fleet.holders if each.role is HolderRole.COPY}
    found: list[Ship] = []
    for node in fleet.nodes.values():
        if node.name != home.name and _may_take(node, home):
            missing = missing_bytes(owner.view, copies.get(node.name))
            travel_s = ship_s(missing, rate(home.view, node.view))
            found.append(Ship(home.name, node.name, missing, travel_s))
    held_tokens = {way: fleet.nodes[way.target].held_tokens for way in found}
    return sorted(found, key=lambda way: (way.travel_s, held_tokens[way], way.target))


def destination(fleet: FleetSnapshot) -> Ship | None:
    """Return the cheapest way to a node whose disk holds what it lacks; None where there is none.

    Among estimates that are too close to tell anything, whoever has most of the agent already,
    and then whoever holds least of others.
    """
    held = fleet.owner.view if fleet.owner is not None else None
    agent_bytes = max(held.bytes.hot, held.bytes.disk) if held is not None else 0
    found = [way for way in ways(fleet) if _fits(way, fleet.nodes[way.target])]
    costs = {way: cost_s(way, fleet.nodes[way.target], agent_bytes) for way in found}
    if not costs:
        return None
    limit_s = near_s(min(costs.values()))
    near = [way for way in found if costs[way] <= limit_s]
    held_tokens = {way: fleet.nodes[way.target].held_tokens for way in near}
    return min(near, key=lambda way: (way.missing_bytes, held_tokens[way], way.target))


def cost_s(way: Ship, node: NodeSnapshot, agent_bytes: int) -> float:
    """Estimate what living at the way's end costs an agent of `agent_bytes`, the move included."""
    view = node.view
    is_roomy = view.free is None or view.free.hot - node.coming_bytes >= agent_bytes
    reload_s = 0.0 if is_roomy else load_s(agent_bytes)
    message_s = prefill_s(MESSAGE_TOKENS, view.prefill_tokens_per_s or PREFILL_TOKENS_PER_S)
    answer_speed = view.decode_tokens_per_s or DECODE_TOKENS_PER_S
    answer_s = decode_s(ANSWER_TOKENS, answer_speed, node.turns)
    return way.travel_s + reload_s + node.promised_s + message_s + answer_s


def _fits(way: Ship, node: NodeSnapshot) -> bool:
    free = node.view.free
    return free is None or free.disk - node.coming_bytes >= way.missing_bytes


def _may_take(node: NodeSnapshot, home: NodeSnapshot) -> bool:
    view = node.view
    is_alike = view.fingerprint == home.view.fingerprint
    return node.is_ready and is_alike and view.reuse and view.degraded is None


def missing_bytes(agent: AgentView | None, held: AgentView | None) -> int:
    """Estimate what a node with an older copy lacks: the tokens that came since."""
    if agent is None or agent.tokens <= 0:
        return 0
    known = min(held.tokens, agent.tokens) if held is not None else 0
    share = 1.0 - known / agent.tokens
    return round(share * max(agent.bytes.disk, agent.bytes.hot))
