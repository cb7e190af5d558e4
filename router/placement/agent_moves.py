"""Weighing of an idle agent's next turn: served by its owner, or elsewhere after a move. Pure.

    stay     wait_o + load_o + tail/P_o + delay_o
    move     travel_i + wait_i then + load_i + tail/P_i + delay_i + evict_i + price

These are the seconds until the first token, with those by which other prompts end later. With the
answer, a move must not cost more either.

The agent's bytes travel while the target's queue gets shorter. The price covers the commit and
keeps agents from moving for rough estimates: for one that moved a moment ago, or where many move,
it is higher, and speeds that are about equal count as equal.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fabric.ids import AgentId
from router.placement.decision import MoveAgent, Ship, TurnFacts
from router.placement.destination import fits, routes
from router.placement.seconds import (
    Job,
    NodeCandidate,
    load_s,
    terms_of,
    tie_limit_s,
)
from router.placement.snapshot import FleetSnapshot
from router.placement.terms import Terms

COMMIT_S: Final = 0.1  # seal, commit and release of a move
NOISE_RATIO: Final = 1.25  # of measured speeds that count as equal
UNREST_FACTOR: Final = 3.0  # of the price, for an agent that moved a moment ago


def with_memory(
    turn: TurnFacts, fleet: FleetSnapshot, nodes: Sequence[NodeCandidate]
) -> list[tuple[NodeCandidate, Ship | None]]:
    """Pair the owner, and each node that may take the agent, with the move that it needs.

    Each has the agent's cached tokens then. Empty if the agent must stay, or where too little is
    known of it.
    """
    owner, by_name = fleet.owner, {node.name: node for node in nodes}
    home = by_name.get(owner.node) if owner is not None else None
    if owner is None or owner.view is None or home is None or not fleet.is_idle:
        return []
    cached = home.cached_tokens or min(owner.view.tokens, turn.prompt_tokens)
    loaded_s = load_s(max(owner.view.bytes.disk, owner.view.bytes.hot))
    is_hot = "hot" in owner.view.tiers
    stay = replace(home, cached_tokens=cached, load_s=0.0 if is_hot else loaded_s)
    options: list[tuple[NodeCandidate, Ship | None]] = [(stay, None)]
    weighed = {name: fleet.nodes[name] for name in by_name}
    for ship in routes(replace(fleet, nodes=weighed)):
        node = by_name[ship.target]
        if not fits(ship, weighed[ship.target]):
            continue
        moved = replace(
            node,
            cached_tokens=cached,
            load_s=loaded_s,
            prefill_tokens_per_s=_beyond_noise(
                node.prefill_tokens_per_s, home.prefill_tokens_per_s
            ),
            decode_tokens_per_s=_beyond_noise(node.decode_tokens_per_s, home.decode_tokens_per_s),
        )
        options.append((moved, ship))
    return options


def _beyond_noise(speed: float, reference: float) -> float:
    """Return a measured speed, or the reference if they are about equal: measures are rough."""
    if speed <= 0 or reference <= 0:
        return reference
    is_near = 1 / NOISE_RATIO < speed / reference < NOISE_RATIO
    return reference if is_near else speed


def cheaper_move(
    turn: TurnFacts, fleet: FleetSnapshot, options: Sequence[tuple[NodeCandidate, Ship | None]]
) -> MoveAgent | None:
    """Return the move that serves the turn soonest, or None if its owner is about as good."""
    job = Job(turn.prompt_tokens, turn.completion_tokens_max)
    stay = next((node for node, ship in options if ship is None), None)
    if stay is None or fleet.agent is None:
        return None
    staying = terms_of(job, stay)
    price_s = COMMIT_S + tie_limit_s(staying.felt_s) - staying.felt_s
    price_s *= fleet.move_price * (UNREST_FACTOR if fleet.moved_lately else 1.0)
    moves = [
        (terms.felt_s, node.held_tokens, node.name, ship, terms)
        for node, ship in options
        if ship is not None
        and (terms := _after_move(job, node, ship, price_s)).felt_s + terms.answer_s
        <= staying.felt_s + staying.answer_s
    ]
    if not moves:
        return None
    best_s, *_, ship, terms = min(moves)
    if best_s + price_s >= staying.felt_s:
        return None
    return MoveAgent(fleet.agent, ship, terms.prefill_s, staying.felt_s - best_s, terms)


def _after_move(job: Job, node: NodeCandidate, ship: Ship, price_s: float) -> Terms:
    """Estimate a turn on a node to which the agent is moved while the queue there gets shorter."""
    left_s = max(0.0, node.queue_s - ship.travel_s)
    share = left_s / node.queue_s if node.queue_s > 0 else 0.0
    prompts_s = tuple(each_s * share for each_s in node.prompts_s)
    later = replace(node, queue_s=left_s, prompts_s=prompts_s)
    return terms_of(job, later, travel_s=ship.travel_s, price_s=price_s)


def move_to(
    turn: TurnFacts, agent: AgentId, node: NodeCandidate, ship: Ship, gain_s: float = 0.0
) -> MoveAgent:
    """Return the decision to move the agent to a node and serve its turn there."""
    job = Job(turn.prompt_tokens, turn.completion_tokens_max)
    terms = _after_move(job, node, ship, 0.0)
    return MoveAgent(agent, ship, terms.prefill_s, gain_s, terms)
