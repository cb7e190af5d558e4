"""Choice of agents to evict, by the node's own code with different ranks, on simulated workloads.

The figure is the share of reusable tokens that were still cached when needed: 1 with room for
everything. It runs `fabric.retention.choose`, the code that nodes run, without models.
"""

import argparse
import random
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from statistics import geometric_mean, mean

from benchmarks.report import Limit, Report
from benchmarks.retention_workloads import WORKLOADS, Ask, Workload
from fabric.ids import AgentId, AgentKey, TenantId
from fabric.retention import Candidate, ReuseProbability, Rules, by_benefit, choose
from node.limits import FREE_SHARE

DESCRIPTION = "which agents to keep: reuse by eviction rank, and under another tenant's flood"
PREFILL_TOKENS_PER_S = 400.0
SEEDS = 5
QUICK_SCALE = 0.15

Rank = Callable[[Candidate], float]


LRU, CHOSEN, IDEAL = "recency (LRU)", "benefit", "knowing the future"
# Ranks with more or less information than a node has are methods of the simulation.
RANKS = (LRU, "frequency", "hyperbolic", "benefit, fixed probability", CHOSEN, IDEAL)


@dataclass(slots=True)
class _Kept:
    ask: Ask
    first_s: float
    turns_count: int


@dataclass(slots=True)
class Score:
    """Tokens of one tenant that were needed again, and those of them that were cached."""

    wanted: int = 0
    found: int = 0

    @property
    def share(self) -> float:
        """Share of the needed tokens that were cached."""
        return self.found / max(1, self.wanted)


@dataclass(slots=True)
class Simulation:
    """Tier of one node under one workload; one byte stands for one token."""

    workload: Workload
    rank_name: str
    now_s: float = 0.0
    scores: dict[str, Score] = field(default_factory=dict)
    _future: dict[str, list[float]] = field(default_factory=dict)  # times of turns, by agent
    _reuse: ReuseProbability = field(default_factory=ReuseProbability)
    _kept: dict[AgentKey, _Kept] = field(default_factory=dict)
    _seen: dict[AgentKey, int] = field(default_factory=dict)
    _seen_groups: dict[str, int] = field(default_factory=dict)

    def run(self) -> dict[str, Score]:
        """Take all turns; return the scores by tenant."""
        for ask in self.workload.asks:
            self._future.setdefault(ask.agent, []).append(ask.at_s)
        for ask in self.workload.asks:
            self.now_s = ask.at_s
            self._take(ask)
        return self.scores

    def _take(self, ask: Ask) -> None:
        key = (TenantId(ask.tenant), AgentId(ask.agent))
        score = self.scores.setdefault(ask.tenant, Score())
        record = self._kept.get(key)
        alike = (k.ask for k in self._kept.values() if ask.group and k.ask.group == ask.group)
        stored_tokens = max((a.shared_tokens for a in alike), default=0)
        score.found += max(
            record.ask.tokens if record else 0, min(stored_tokens, ask.shared_tokens)
        )
        seen_tokens = min(self._seen_groups.get(ask.group, 0), ask.shared_tokens)
        score.wanted += max(self._seen.get(key, 0), seen_tokens)
        self._seen[key] = ask.tokens
        if ask.group:
            group_tokens = self._seen_groups.get(ask.group, 0)
            self._seen_groups[ask.group] = max(group_tokens, ask.shared_tokens)
        first_s, turns_count = (record.first_s, record.turns_count) if record else (ask.at_s, 0)
        self._kept[key] = _Kept(ask, first_s, turns_count + 1)
        self._reuse.note(key[0], turns_count + 1)
        self._evict(key)

    def _held_tokens(self) -> int:
        fixed, own_tokens, shared = self.workload.fixed_tokens, 0, set()
        for record in self._kept.values():
            own_tokens += record.ask.tokens - record.ask.shared_tokens + fixed
            shared.add((record.ask.group, record.ask.shared_tokens))
        return own_tokens + sum(tokens for _, tokens in shared)

    def _evict(self, active: AgentKey) -> None:
        if self._held_tokens() <= self.workload.budget_tokens:
            return
        candidates = [self._candidate(key, record, active) for key, record in self._kept.items()]
        budget = self.workload.budget_tokens
        rules = Rules(rank=self._rank())
        for candidate in choose(candidates, budget, rules, free_share=FREE_SHARE).dropped:
            del self._kept[candidate.key]

    def _candidate(self, key: AgentKey, record: _Kept, active: AgentKey) -> Candidate:
        ask = record.ask
        own_tokens = ask.tokens - ask.shared_tokens + self.workload.fixed_tokens
        shared: dict[Hashable, int] = {}
        if ask.group:
            shared = {f"{ask.group}:{ask.shared_tokens}": ask.shared_tokens}
        return Candidate(
            key,
            {ask.agent: own_tokens, **shared},
            self.now_s - ask.at_s,
            self._reuse.probability(key[0], record.turns_count),
            ask.tokens / PREFILL_TOKENS_PER_S,
            is_active=key == active,
        )

    def _rank(self) -> Rank:
        return {
            LRU: lambda candidate: -candidate.idle_s,
            "frequency": self._by_frequency,
            "hyperbolic": self._by_hyperbola,
            "benefit, fixed probability": lambda c: by_benefit(replace(c, reuse_probability=0.5)),
            CHOSEN: by_benefit,
            IDEAL: self._by_next_turn,
        }[self.rank_name]

    def _by_frequency(self, candidate: Candidate) -> float:
        """Rank by the turns taken, per byte (GreedyDual-Size-Frequency without its clock)."""
        turns_count = self._kept[candidate.key].turns_count
        return turns_count * candidate.saves_s / candidate.size_bytes

    def _by_hyperbola(self, candidate: Candidate) -> float:
        """Rank by the turns per second of life, per byte (hyperbolic caching)."""
        age_s = self.now_s - self._kept[candidate.key].first_s
        return self._by_frequency(candidate) / (1.0 + age_s)

    def _by_next_turn(self, candidate: Candidate) -> float:
        """Rank by the true time of the next turn, which no node knows."""
        coming = (t for t in self._future[candidate.key[1]] if t > self.now_s)
        wait_s = min(coming, default=float("inf")) - self.now_s
        return candidate.saves_s / candidate.size_bytes / (wait_s + 1e-9)


def simulate(workload: Workload, rank_name: str) -> dict[str, Score]:
    """Run a workload under one of RANKS; return the scores by tenant."""
    return Simulation(workload, rank_name).run()


def _alone(workload: Workload, tenant: str) -> Workload:
    asks = tuple(ask for ask in workload.asks if ask.tenant == tenant)
    return Workload(asks, workload.budget_tokens, workload.fixed_tokens)


def _reuse(scores: dict[str, Score]) -> float:
    total = Score(sum(s.wanted for s in scores.values()), sum(s.found for s in scores.values()))
    return total.share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"per workload (default {SEEDS})")


def run(arguments: argparse.Namespace) -> Report:
    """Compare the ranks on every workload, and a tenant's reuse with and without a flood."""
    scale = QUICK_SCALE if arguments.quick else 1.0
    seeds = range(1 if arguments.quick else arguments.seeds)
    workloads_by_kind = {
        name: [make(random.Random(seed), scale) for seed in seeds]
        for name, make in WORKLOADS.items()
    }
    reuse = {
        name: {
            rank_name: mean(_reuse(simulate(workload, rank_name)) for workload in workloads)
            for rank_name in RANKS
        }
        for name, workloads in workloads_by_kind.items()
    }
    flooded = workloads_by_kind["two tenants"]
    beside = mean(simulate(workload, CHOSEN)["b"].share for workload in flooded)
    alone = mean(simulate(_alone(workload, "b"), CHOSEN)["b"].share for workload in flooded)
    gains = {name: row[CHOSEN] / row[LRU] for name, row in reuse.items()}
    return Report(
        parameters={"seeds": len(seeds), "scale": scale, "free_share": FREE_SHARE},
        figures={"reuse": reuse, "flooded": {"b": {"beside a": beside, "alone": alone}}},
        ratios={f"{name}, {CHOSEN} over LRU": gain for name, gain in gains.items()},
        limits=(
            Limit(
                "benefit over LRU, mean of all workloads",
                geometric_mean(gains.values()),
                1.02,
                is_least=True,
            ),
            Limit("benefit over LRU, worst workload", min(gains.values()), 0.99, is_least=True),
            Limit(
                "a tenant's reuse beside a flood, over alone", beside / alone, 1.0, is_least=True
            ),
        ),
        notes=("invented workloads: they show what a rank does, not what your agents do",),
    )
