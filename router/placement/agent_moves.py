"""Weighing of an idle agent's next turn: served by its owner, or elsewhere after a move. Pure.

    stay     queue_o + load_o + tail/P_o
    move     max(queue_i, travel_i) + load_i + tail/P_i + price

These are the seconds until the first token. With the answer, a move must not cost more either.

The agent's bytes travel while the target's queue gets shorter. The price covers the commit and
keeps agents from moving for rough estimates: for one that moved a moment ago it is higher, and
speeds that are about equal count as equal.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fabric.ids import AgentId
from router.placement.decision import MoveAgent, Ship, TurnFacts
from router.placement.destination import fits, routes
from router.placement.seconds import (
    Job,
    NodeCandidate,
    answer_s,
    first_token_s,
    load_s,
    prefill_s,
    tie_limit_s,
)
from router.placement.snapshot import FleetSnapshot

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
    if stay is None:
        return None
    stay_s = first_token_s(job, stay)
    end_s = stay_s + answer_s(job, stay)
    price_s = COMMIT_S + tie_limit_s(stay_s) - stay_s
    if fleet.moved_lately:
        price_s *= UNREST_FACTOR
    moves = [
        (after_s, node.held_tokens, node.name, node, ship)
        for node, ship in options
        if ship is not None
        and (after_s := _after_move_s(job, node, ship)) + answer_s(job, node) <= end_s
    ]
    best_s, _, _, node, ship = min(moves, default=(math.inf, 0, "", stay, None))
    if ship is None or best_s + price_s >= stay_s:
        return None
    assert fleet.agent is not None, "its owner is known"
    return move_to(turn, fleet.agent, node, ship, stay_s - best_s)


def _after_move_s(job: Job, node: NodeCandidate, ship: Ship) -> float:
    """Estimate the seconds until the first token on a node to which the agent is moved first."""
    left_s = max(0.0, node.queue_s - ship.travel_s)
    return ship.travel_s + first_token_s(job, replace(node, queue_s=left_s))


def move_to(
    turn: TurnFacts, agent: AgentId, node: NodeCandidate, ship: Ship, gain_s: float = 0.0
) -> MoveAgent:
    """Return the decision to move the agent to a node and serve its turn there."""
    expected_s = prefill_s(turn.prompt_tokens - node.cached_tokens, node.prefill_tokens_per_s)
    return MoveAgent(agent, ship, expected_s, gain_s)
