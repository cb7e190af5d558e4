"""Moves of an idle agent as ways to serve its next turn. Pure.

    move     travel_i + wait_i then + load_i + tail/P_i + delay_i + evict_i + price

The agent's bytes travel while the target's queue gets shorter. The price covers the commit and
keeps agents from moving for rough estimates: for one that moved a moment ago, or where many move,
it is higher, and speeds that are about equal count as equal.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from fabric.control.node_calls import AgentView
from router.placement.decision import How
from router.placement.destination import fits, routes
from router.placement.seconds import (
    SHIP_START_S,
    STICKINESS_S,
    Job,
    NodeCandidate,
    Option,
    load_s,
    terms_of,
    tie_limit_s,
)
from router.placement.snapshot import FleetSnapshot

COMMIT_S: Final = 0.1  # seal, commit and release of a move
MOVE_S_MIN: Final = COMMIT_S + STICKINESS_S + SHIP_START_S  # least cost of a move, with its price
NOISE_RATIO: Final = 1.25  # of measured speeds that count as equal
RECENT_MOVE_FACTOR: Final = 3.0  # of the price, for an agent that moved a moment ago


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


def stored_size_bytes(agent: AgentView) -> int:
    """Return the bytes of an agent's cache on disk, once all of it is there."""
    return max(agent.bytes.disk, agent.bytes.hot)


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
