"""Where an agent that must leave its node is best off, in seconds: pure arithmetic.

    C(i) = travel_i + reload_i + turn_i
    travel_i   bytes that i lacks ÷ what the links carry
    reload_i   from disk each turn, where i's memory does not hold it beside the others
    turn_i     the queue, one more message and one more answer at i's speed

Source: the placement of turns (`router.placement.seconds`), with a message and an answer as are
usual in place of those of one request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.control.node_calls import Address, LinkKind, NodeView
from fabric.ids import NodeName
from fabric.net.compression import link_bytes_per_s
from router.placement.seconds import (
    PREFILL_TOKENS_PER_S,
    SHIP_EFFICIENCY,
    SHIP_START_S,
    STICKINESS_S,
    STICKINESS_SHARE,
)

MESSAGE_TOKENS = 512
ANSWER_TOKENS = 256
DISK_BYTES_PER_S = 2e9  # a guess below what any Apple SSD reads
DECODE_TOKENS_PER_S = 30.0
LINK_BYTES_PER_S = 1e9 / 8  # where two nodes have no kind of link in common that says more


@dataclass(frozen=True, slots=True)
class Site:
    """One node that may take an agent; `None`: it does not say."""

    name: NodeName
    missing_bytes: int
    link_bytes_per_s: float
    prefill_tokens_per_s: float = 0.0  # 0: not measured yet
    decode_tokens_per_s: float = 0.0
    queue_s: float = 0.0
    active: int = 0
    held_tokens: int = 0
    hot_free_bytes: int | None = None
    disk_free_bytes: int | None = None


def travel_s(site: Site) -> float:
    """Estimate the seconds until what the site lacks is there."""
    if site.missing_bytes <= 0:
        return SHIP_START_S
    return SHIP_START_S + site.missing_bytes / (SHIP_EFFICIENCY * site.link_bytes_per_s)


def cost_s(site: Site, agent_bytes: int) -> float:
    """Estimate what living there costs an agent of `agent_bytes`, the move included."""
    is_roomy = site.hot_free_bytes is None or site.hot_free_bytes >= agent_bytes
    reload_s = 0.0 if is_roomy else agent_bytes / DISK_BYTES_PER_S
    prefill_s = MESSAGE_TOKENS / (site.prefill_tokens_per_s or PREFILL_TOKENS_PER_S)
    crowd = math.sqrt(site.active + 1)  # one answer slows down with the root of their number
    decode_s = crowd * ANSWER_TOKENS / (site.decode_tokens_per_s or DECODE_TOKENS_PER_S)
    return travel_s(site) + reload_s + site.queue_s + prefill_s + decode_s


def choose_site(sites: Sequence[Site], agent_bytes: int) -> Site | None:
    """Return the cheapest site whose disk holds what it lacks; None where there is none.

    Among estimates that are too close to tell anything, whoever has most of the agent already,
    and then whoever holds least of others.
    """
    costs = {
        site.name: cost_s(site, agent_bytes)
        for site in sites
        if site.disk_free_bytes is None or site.disk_free_bytes >= site.missing_bytes
    }
    if not costs:
        return None
    best_s = min(costs.values())
    near_s = best_s + max(STICKINESS_S, STICKINESS_SHARE * best_s)
    near = [site for site in sites if costs.get(site.name, math.inf) <= near_s]
    return min(near, key=lambda site: (site.missing_bytes, site.held_tokens, site.name))


def path_bytes_per_s(source: NodeView, target: NodeView) -> float:
    """Estimate the best path by what both ends say of their links."""
    ours, theirs = _by_kind(source.addresses), _by_kind(target.addresses)
    if source.host != target.host:
        ours.pop(LinkKind.LOOPBACK, None)
    shared = [min(ours[kind], theirs[kind]) for kind in ours.keys() & theirs.keys()]
    return max(shared, default=LINK_BYTES_PER_S)


def _by_kind(addresses: Sequence[Address]) -> dict[LinkKind, float]:
    best: dict[LinkKind, float] = {}
    for address in addresses:
        rate = float(link_bytes_per_s(address))
        best[address.kind] = max(rate, best.get(address.kind, 0.0))
    return best
