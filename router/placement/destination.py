"""Where an agent that must leave its node is best off, in seconds: pure arithmetic.

    C(i) = travel_i + reload_i + turn_i
    travel_i   bytes that i lacks ÷ what the links carry
    reload_i   from disk each turn, where i's memory does not hold it beside the others
    turn_i     the queue, one more message and one more answer at i's speed

The terms are those by which turns are placed (`router.placement.cost`), with a message and an
answer as are usual in place of those of one request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.assumed_speeds import DECODE_TOKENS_PER_S, PREFILL_TOKENS_PER_S
from fabric.ids import NodeName
from router.placement.cost import decode_s, load_s, near_s, prefill_s, ship_s

MESSAGE_TOKENS = 512
ANSWER_TOKENS = 256


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
    return ship_s(site.missing_bytes, site.link_bytes_per_s)


def cost_s(site: Site, agent_bytes: int) -> float:
    """Estimate what living there costs an agent of `agent_bytes`, the move included."""
    is_roomy = site.hot_free_bytes is None or site.hot_free_bytes >= agent_bytes
    reload_s = 0.0 if is_roomy else load_s(agent_bytes)
    message_s = prefill_s(MESSAGE_TOKENS, site.prefill_tokens_per_s or PREFILL_TOKENS_PER_S)
    answer_speed = site.decode_tokens_per_s or DECODE_TOKENS_PER_S
    answer_s = decode_s(ANSWER_TOKENS, answer_speed, site.active)
    return travel_s(site) + reload_s + site.queue_s + message_s + answer_s


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
    limit_s = near_s(min(costs.values()))
    near = [site for site in sites if costs.get(site.name, math.inf) <= limit_s]
    return min(near, key=lambda site: (site.missing_bytes, site.held_tokens, site.name))
