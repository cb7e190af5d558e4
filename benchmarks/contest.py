"""Measure contestants side by side on a shared machine.

Contestants alternate within one run, so that other load on the machine affects all of them, and
the figures are medians over the rounds.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.report import is_gpu, say

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Spent:
    """Cost of one turn of a contestant."""

    tokens_count: int
    cpu_s: float  # of all threads of this process
    wall_s: float


def judged_clock() -> str:
    """Return the clock of the judged ratios: CPU time if the CPU does the work.

    Wall time on a shared machine includes other load; a GPU's work is in wall time only.
    """
    return "wall" if is_gpu() else "cpu"


def stopwatch(work: Callable[[], int]) -> Spent:
    """Measure `work`, which returns its number of tokens."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    tokens_count = work()
    return Spent(tokens_count, time.process_time() - cpu_s, time.perf_counter() - wall_s)


def contest(
    name: str, contestants: Mapping[str, Callable[[], int]], rounds: int
) -> dict[str, list[Spent]]:
    """Let each contestant work once a round, in alternating order; the first round warms up."""
    spent: dict[str, list[Spent]] = {contestant: [] for contestant in contestants}
    for number in range(rounds + 1):
        for contestant in list(contestants)[:: 1 if number % 2 else -1]:
            one_turn = stopwatch(contestants[contestant])
            if number:
                spent[contestant].append(one_turn)
                rate = one_turn.tokens_count / one_turn.wall_s
                say(f"{name}, round {number} of {rounds}: {contestant} {rate:.1f} tokens/s")
    return spent


def rates(spent: list[Spent]) -> dict[str, float]:
    """Return the median tokens per second by both clocks."""
    return {
        "tokens_per_cpu_s": statistics.median(s.tokens_count / s.cpu_s for s in spent),
        "tokens_per_wall_s": statistics.median(s.tokens_count / s.wall_s for s in spent),
    }


def rate_ratios(ours: list[Spent], theirs: list[Spent]) -> dict[str, float]:
    """Return the median over the rounds of our rate over theirs, by both clocks.

    `low` and `high`: the 95 % interval of the judged one.
    """
    pairs = list(zip(ours, theirs, strict=True))
    tokens = np.array([a.tokens_count / b.tokens_count for a, b in pairs])
    by_clock = {
        "cpu": tokens * np.array([b.cpu_s / a.cpu_s for a, b in pairs]),
        "wall": tokens * np.array([b.wall_s / a.wall_s for a, b in pairs]),
    }
    low, high = bootstrap_interval(by_clock[judged_clock()], np.median)
    medians = {clock: float(np.median(found)) for clock, found in by_clock.items()}
    return medians | {"low": low, "high": high}


def bootstrap_interval(
    values: np.ndarray, statistic: Callable[..., np.ndarray] = np.mean
) -> tuple[float, float]:
    """Return the 95 % interval of a statistic, resampling `values` with replacement.

    Source: Efron, "Bootstrap methods", 1979 (percentile interval).
    """
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(statistic(values[picks], axis=1), (2.5, 97.5))
    return float(low), float(high)
