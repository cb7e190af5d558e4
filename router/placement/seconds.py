"""Cost of each option to serve a turn, in seconds. Pure.

    C(i) = wait_i + bring_i + min(U/P_i, load_i + U_c/P_i) + decode(i)/4 + delay_i + evict_i
         + (i has its share) · s + risk_i + price_i

U: tokens of the prompt; U_c: those that node i has not cached; P_i: its prefill speed; s: the
turn's work once more, or two margins of stickiness while turns run. `Terms` has what each of them
means. Among costs within `tie_limit_s` of the best, the agent's home wins. Moves are compared in
seconds too: comparing blocks or cache hits would send work to slow nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from fabric.assumed_speeds import DISK_BYTES_PER_S
from fabric.ids import NodeName
from fabric.turn.generation import HeadLoan
from router.placement.decision import How, Ship, Terms
from router.placement.snapshot import FleetTotals

SHIP_START_S = 0.03
BATCH_EXPONENT = 0.5  # one sequence's decode speed falls with the root of the batch size
TOKENS_PER_S_MIN = 1.0
SHORT_PROMPT_TOKENS = 512  # what is left of a prompt that overtakes others (docs/scheduling.md)
CHUNK_S = 0.5  # of a long prompt, which a short one waits for
STICKINESS_S = 0.15
STICKINESS_SHARE = 0.1


def prefill_s(tokens: float, tokens_per_s: float) -> float:
    """Estimate the time to prefill `tokens`; negative counts take no time."""
    return max(0.0, tokens) / max(tokens_per_s, TOKENS_PER_S_MIN)


def decode_s(tokens: int, tokens_per_s: float, active: int) -> float:
    """Estimate the time to decode an answer beside `active` others."""
    slowdown: float = (active + 1) ** BATCH_EXPONENT
    return tokens * slowdown / max(tokens_per_s, TOKENS_PER_S_MIN)


def load_s(stored_bytes: float, bytes_per_s: float = DISK_BYTES_PER_S) -> float:
    """Estimate the time to load a cache from disk into memory."""
    return stored_bytes / bytes_per_s


def ship_s(missing_bytes: int, bytes_per_s: float) -> float:
    """Estimate the time to transfer bytes between nodes, at a rate of `link_rates`."""
    return SHIP_START_S if missing_bytes <= 0 else SHIP_START_S + missing_bytes / bytes_per_s


def tie_limit_s(best_s: float) -> float:
    """Return the cost up to which rough estimates count as equal to the best."""
    return best_s + max(STICKINESS_S, STICKINESS_SHARE * best_s)


DECODE_TOKENS_EXPECTED = 256  # answers are rarely as long as max_tokens allows
REUSE_CHANCE = 0.5  # of what leaves memory for a turn: the node evicts what it expects least
# Slowdown assumed of a node with its share of agents while turns run: their load reflects the rest.
# In a calm fleet it is the turn's work once more, as nothing else predicts how busy the node will
# be, and agents with one prefix should not all follow the first.
SHARE_S = 2 * STICKINESS_S
SHARE_SLACK = 1.15  # a node with this multiple of its share of agents yields to others
SPEED_CLASS = 3.0  # nodes within a factor of sqrt(this) of the median speed have equal shares


@dataclass(frozen=True, slots=True)
class NodeCandidate:
    """Node that may serve the turn."""

    name: NodeName
    prefill_tokens_per_s: float
    decode_tokens_per_s: float = 0.0  # 0: not measured yet
    queue_s: float = 0.0
    prompts_s: tuple[float, ...] = ()  # the queue by prompt, as far as it is known
    active: int = 0
    cached_tokens: int = 0
    coming_s: float = 0.0  # until they are computed, where a turn was just sent that does
    load_s: float = 0.0  # to bring the cached tokens from disk into memory
    held_tokens: int = 0
    cold_order: int = 0  # higher: given a turn with nothing cached more recently
    turn_order: int = 0  # higher: given any turn more recently
    agents: int = 0  # on the node, including those just placed there
    evict_s: float = 0.0  # to load again what must leave its memory for the turn, if it is used
    slowness: float = 1.0  # factor by which heat or a lack of memory makes it a worse choice
    weight: float = 1.0  # its share of all agents, relative to other nodes
    over_share: bool = False  # it has its share of agents already


@dataclass(frozen=True, slots=True)
class Job:
    """Turn to be placed."""

    prompt_tokens: int
    completion_tokens_max: int
    is_calm: bool = True  # no turn runs on any node


@dataclass(frozen=True, slots=True)
class Option:
    """Way to serve a turn."""

    how: How
    node: NodeCandidate  # with what it has of the prompt when it begins
    terms: Terms
    ship: Ship | None = None  # transfer of the agent, if it is moved first
    loan: HeadLoan | None = None  # offer of the beginning that another node sends
    carried_bytes: int = 0  # size of that beginning


def terms_of(
    job: Job, node: NodeCandidate, *, travel_s: float = 0.0, price_s: float = 0.0
) -> Terms:
    """Estimate what serving `job` on `node` costs.

    A transfer to the node overlaps with its queue.
    """
    queue_s, prompts_s = _queue_after(node, travel_s)
    rate, load_s = node.prefill_tokens_per_s, node.load_s
    own_s, anew_s = _rest_s(job, node), prefill_s(job.prompt_tokens, rate)
    rest_s = own_s
    if anew_s <= load_s + own_s:
        load_s, rest_s = 0.0, anew_s
    answers_s = answer_s(job, node)
    share_s = 0.0
    if node.over_share:
        share_s = max(SHARE_S, anew_s + answers_s) if job.is_calm else SHARE_S
    wait_s = delay_s = 0.0
    if queue_s > 0:
        # Long prompts take turns, so each delays another by no more than that one's own length.
        turns_s = sum([min(left_s, own_s) for left_s in prompts_s])
        unknown_s = max(0.0, queue_s - sum(prompts_s))
        wait_s = unknown_s + turns_s
        if job.prompt_tokens - node.cached_tokens <= SHORT_PROMPT_TOKENS:
            wait_s = _short_wait_s(node, queue_s, prompts_s)
        wait_s = max(wait_s, node.coming_s)
        delay_s = turns_s + min(unknown_s, own_s)
    return Terms(
        queue_s=wait_s,
        bring_s=travel_s,
        load_s=load_s,
        prefill_s=rest_s,
        answer_s=answers_s,
        delay_s=delay_s,
        evict_s=node.evict_s,
        share_s=share_s,
        risk_s=(node.slowness - 1.0) * (rest_s + answers_s),
        price_s=price_s,
    )


def _queue_after(node: NodeCandidate, seconds: float) -> tuple[float, Sequence[float]]:
    """Return the node's queue after some seconds, and the prompts in it."""
    if seconds <= 0 or node.queue_s <= 0:
        return node.queue_s, node.prompts_s
    left_s = max(0.0, node.queue_s - seconds)
    share = left_s / node.queue_s
    return left_s, [each_s * share for each_s in node.prompts_s]


def _rest_s(job: Job, node: NodeCandidate) -> float:
    """Return the seconds of prefill of the tokens that the node has not cached."""
    return prefill_s(job.prompt_tokens - node.cached_tokens, node.prefill_tokens_per_s)


def answer_s(job: Job, node: NodeCandidate) -> float:
    """Estimate the answer's seconds and those by which it slows down others."""
    if node.decode_tokens_per_s <= 0:
        return 0.0
    tokens = min(job.completion_tokens_max, DECODE_TOKENS_EXPECTED)
    return decode_s(tokens, node.decode_tokens_per_s, 0) * answer_factor(node.active)


def answer_factor(active: int) -> float:
    """Return by how much an answer beside `active` others costs more, with what those lose."""
    with_us: float = (active + 1) ** BATCH_EXPONENT
    without_us: float = max(active, 1) ** BATCH_EXPONENT
    return with_us + active * (with_us - without_us)


def _short_wait_s(node: NodeCandidate, queue_s: float, prompts_s: Sequence[float]) -> float:
    """Estimate the wait of a short prompt: it overtakes long ones, but for a chunk of one."""
    short_s = prefill_s(SHORT_PROMPT_TOKENS, node.prefill_tokens_per_s)
    ahead_s = sum([left_s for left_s in prompts_s if left_s <= short_s])
    return min(queue_s, ahead_s + CHUNK_S)


def coming_s(queue_s: float, prompts_s: Sequence[float], lead_s: float) -> float:
    """Estimate the seconds until a node has computed a beginning that takes it `lead_s`."""
    unknown_s = max(0.0, queue_s - sum(prompts_s))
    return unknown_s + sum(min(left_s, lead_s) for left_s in prompts_s)


def assumed_rates(measured: Sequence[float], unknown: float) -> list[float]:
    """Replace unmeasured speeds by the mean of the measured ones."""
    positive = [rate for rate in measured if rate > 0]
    if len(positive) == len(measured):
        return positive
    mean = fmean(positive) if positive else unknown
    return [rate if rate > 0 else mean for rate in measured]


def with_shares(
    nodes: Sequence[NodeCandidate], kept: NodeName | None, totals: FleetTotals | None = None
) -> list[NodeCandidate]:
    """Mark the nodes that have their share of all agents already, weighted by class of speed.

    `kept` has a copy of the agent, so its share does not matter. The `totals` are those of all
    nodes, if `nodes` are only some of them.
    """
    if totals is None:
        middle = median(node.prefill_tokens_per_s for node in nodes)
    else:
        middle = totals.prefill_median
    weights = [class_weight(node.prefill_tokens_per_s / middle) for node in nodes]
    agents = sum(node.agents for node in nodes) if totals is None else totals.agents
    share = SHARE_SLACK * (agents + 1) / (sum(weights) if totals is None else totals.weights)
    marked = []
    for node, weight in zip(nodes, weights, strict=True):
        is_over = node.name != kept and node.agents + 1 > max(1, round(share * weight))
        is_changed = weight != node.weight or is_over != node.over_share
        marked.append(replace(node, weight=weight, over_share=is_over) if is_changed else node)
    return marked


def class_weight(speed: float) -> float:
    """Return a node's share by its speed as a multiple of the median, rounded to a class."""
    # Measured speeds are rough: only classes of speed count.
    weight: float = SPEED_CLASS ** round(math.log(speed, SPEED_CLASS))
    return weight
