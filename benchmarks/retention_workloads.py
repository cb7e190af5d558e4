"""Seeded workloads of agents for the retention benchmark.

Seconds and tokens are invented, with the shapes of agents' work: bursts of tool calls, pauses for
people, one-shot side requests, long contexts that rest for hours.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """Turn, with the tokens in the agent's memory after it."""

    at_s: float
    tenant: str
    agent: str
    tokens: int
    group: str = ""  # the group whose tokens begin the context
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Turns by time, and the budget for their tokens."""

    asks: tuple[Ask, ...]
    budget_tokens: int
    fixed_tokens: int = 0  # an agent's constant part (recurrent states), in tokens


def _lognormal(rng: random.Random, median: float, spread: float) -> float:
    return median * math.exp(rng.gauss(0.0, spread))


def _turns(  # noqa: PLR0913 - a conversation's whole shape
    rng: random.Random,
    agent: str,
    start_s: float,
    tokens: int,
    count: int,
    gap_s: float,
    *,
    grows_tokens: float = 700.0,
    tenant: str = "a",
    group: str = "",
    shared_tokens: int = 0,
) -> Iterator[Ask]:
    at_s = start_s
    for _ in range(count):
        yield Ask(at_s, tenant, agent, tokens, group, shared_tokens)
        at_s += _lognormal(rng, gap_s, 0.8)
        tokens += round(_lognormal(rng, grows_tokens, 0.6))


def _workload(asks: list[Ask], budget_tokens: int, fixed_tokens: int = 0) -> Workload:
    ordered = sorted(asks, key=lambda ask: (ask.at_s, ask.agent))
    return Workload(tuple(ordered), budget_tokens, fixed_tokens)


def agent_loops(rng: random.Random, scale: float) -> Workload:
    """Return coding agents: bursts of tool calls, a third resumed after a pause, the rest never."""
    asks: list[Ask] = []
    for index in range(round(150 * scale)):
        name, kind = f"loop-{index}", f"tools-{rng.randrange(3)}"
        start_s = rng.uniform(0, 4 * HOUR_S * scale)
        count = 2 + int(rng.expovariate(1 / 12))
        turns = list(_turns(rng, name, start_s, 3_500, count, 9, group=kind, shared_tokens=3_000))
        while rng.random() < 1 / 3:
            pause_s = _lognormal(rng, 900, 1.0)
            last = turns[-1]
            turns += _turns(
                rng, name, last.at_s + pause_s, last.tokens + 400, count, 9,
                group=kind, shared_tokens=3_000,
            )  # fmt: skip
        asks += turns
    return _workload(asks, 110_000)


def fan_out(rng: random.Random, scale: float) -> Workload:
    """Return planners that fork workers, which take a few turns before the planner continues."""
    asks: list[Ask] = []
    for index in range(round(30 * scale)):
        start_s, tokens = rng.uniform(0, 3 * HOUR_S * scale), rng.randrange(8_000, 30_000)
        plan = f"plan-{index}"
        for _ in range(rng.randrange(2, 6)):
            asks.append(Ask(start_s, "a", plan, tokens, plan, tokens))
            for worker in range(rng.randrange(6, 16)):
                name = f"{plan}-{start_s:.0f}-{worker}"
                asks += _turns(
                    rng, name, start_s + rng.uniform(1, 30), tokens + 500, rng.randrange(1, 5), 12,
                    group=plan, shared_tokens=tokens,
                )  # fmt: skip
            start_s += _lognormal(rng, 500, 0.7)
            tokens += rng.randrange(1_000, 4_000)
    return _workload(asks, 110_000)


def scan(rng: random.Random, scale: float) -> Workload:
    """Return steady agents beside a stream of one-shot prompts that are never repeated."""
    end_s = 3 * HOUR_S * scale
    return _workload([*_steady(rng, 25, end_s, "a"), *_one_shots(rng, end_s, 6.0, "a")], 420_000)


def idle_giants(rng: random.Random, scale: float) -> Workload:
    """Return long contexts that rest for an hour beside small chats, all with large states."""
    end_s = 10 * HOUR_S * scale
    asks: list[Ask] = []
    for index in range(8):
        count = round(end_s / HOUR_S) + 1
        start_s = rng.uniform(0, HOUR_S)
        asks += _turns(rng, f"giant-{index}", start_s, 60_000, count, 3_000)
    for index in range(round(200 * scale)):
        start_s, count = rng.uniform(0, end_s), 1 + int(rng.expovariate(1 / 6))
        asks += _turns(rng, f"chat-{index}", start_s, 1_500, count, 200)
    return _workload([ask for ask in asks if ask.at_s < end_s], 400_000, 4_000)


def two_tenants(rng: random.Random, scale: float) -> Workload:
    """Return steady agents of tenant b that fit half the budget, and a flood by tenant a."""
    end_s = 3 * HOUR_S * scale
    return _workload([*_steady(rng, 10, end_s, "b"), *_one_shots(rng, end_s, 3.0, "a")], 420_000)


def _steady(rng: random.Random, count: int, end_s: float, tenant: str) -> Iterator[Ask]:
    for index in range(count):
        gap_s = _lognormal(rng, 150, 0.8)
        turns = _turns(
            rng, f"steady-{tenant}-{index}", rng.uniform(0, gap_s), rng.randrange(6_000, 18_000),
            1 + round(end_s / gap_s), gap_s, grows_tokens=20, tenant=tenant,
        )  # fmt: skip
        yield from (ask for ask in turns if ask.at_s < end_s)


def _one_shots(rng: random.Random, end_s: float, every_s: float, tenant: str) -> Iterator[Ask]:
    at_s, index = 0.0, 0
    while at_s < end_s:
        yield Ask(at_s, tenant, f"once-{index}", round(_lognormal(rng, 4_000, 0.7)))
        at_s, index = at_s + rng.expovariate(1 / every_s), index + 1


WORKLOADS: dict[str, Callable[[random.Random, float], Workload]] = {
    "agent loops": agent_loops,
    "fan-out": fan_out,
    "scan": scan,
    "idle giants": idle_giants,
    "two tenants": two_tenants,
}
