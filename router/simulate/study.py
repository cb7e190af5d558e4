"""Studies: every policy on the same seeds of the same workloads, and how they compare."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.simulate.catalog import SHIPPED, TUNED, TUNED_FROM
from router.simulate.fleet_file import FleetModel
from router.simulate.run import Conditions, Outcome, SimulatedRun
from router.simulate.sessions import Arrival
from router.simulate.statistics import Interval, geometric_mean, interval, ratio
from router.simulate.traces import TraceRow, arrivals_of
from router.simulate.workload import Scale, Workload, capacity_per_s, work_of

FORMAT = 1  # of the JSON


@dataclass(frozen=True, slots=True)
class CellPlan:
    """Workload or trace at one load."""

    name: str
    title: str
    load: float | None  # share of the fleet's capacity; None: as in the trace
    sessions_per_s: float | None
    turns_expected: int
    arrivals: Callable[[int], Iterator[Arrival]]  # by seed
    measured_ttft_s: float | None = None  # mean of a router's own log


def plan_workload(
    workload: Workload, fleet: FleetModel, load: float, sessions: int | None
) -> CellPlan:
    """Plan a workload at a share of the fleet's capacity."""
    scale, count = Scale.of(fleet), sessions or workload.sessions
    work = work_of(workload, scale, count)
    per_s = load * capacity_per_s(fleet, work)

    def arrivals(seed: int) -> Iterator[Arrival]:
        return workload.arrivals(seed, scale, count, per_s)

    turns = round(work.turns * count)
    return CellPlan(workload.name, workload.title, load, per_s, turns, arrivals)


def plan_trace(name: str, rows: Sequence[TraceRow], speedup: float) -> CellPlan:
    """Plan a trace, whose arrivals are the same for every seed."""

    def arrivals(_seed: int) -> Iterator[Arrival]:
        return arrivals_of(rows, speedup)

    known = [row.ttft_s for row in rows if row.ttft_s is not None]
    measured_s = sum(known) / len(known) if known and speedup == 1.0 else None
    return CellPlan(name, "trace", None, None, len(rows), arrivals, measured_s)


@dataclass(frozen=True, slots=True)
class Compared:
    """Figures of a policy in a cell."""

    policy: str
    outcomes: tuple[Outcome, ...]
    ttft_mean_s: Interval
    ttft_p95_s: Interval
    mean_ratio: Interval  # of its mean over the reference's, paired by seed
    p95_ratio: Interval
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        intervals = ("ttft_mean_s", "ttft_p95_s", "mean_ratio", "p95_ratio")
        figures: dict[str, Any] = {name: getattr(self, name).as_json() for name in intervals}
        if self.note:
            figures["note"] = self.note
        return figures | {"runs": [outcome.as_json() for outcome in self.outcomes]}


@dataclass(frozen=True, slots=True)
class Cell:
    """All policies on one workload at one load."""

    plan: CellPlan
    compared: tuple[Compared, ...]

    @property
    def reference(self) -> str:
        """The policy with which the others are compared."""
        return self.compared[0].policy

    def as_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        plan = self.plan
        per_s = None if plan.sessions_per_s is None else round(plan.sessions_per_s, 6)
        return {
            "workload": plan.name,
            "title": plan.title,
            "load": plan.load,
            "sessions_per_s": per_s,
            "reference": self.reference,
            "measured_ttft_s": _round_s(plan.measured_ttft_s),
            "policies": {each.policy: each.as_json() for each in self.compared},
        }


Watch = Callable[[CellPlan, str, int, int, float], None]  # cell, policy, seed, turns, simulated s


@dataclass(frozen=True, slots=True)
class Study:
    """Policies that are compared on one fleet under the same conditions."""

    fleet: FleetModel
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    conditions: Conditions

    def run_policies(self) -> list[str]:
        """List the policies to run: those requested, and those that are tuned over."""
        runs = [name for name in self.policies if name != TUNED]
        if TUNED in self.policies:
            runs += [name for name in TUNED_FROM if name not in runs]
        return runs

    def cell(self, plan: CellPlan, watch: Watch | None = None) -> Cell:
        """Run all policies on all seeds of one workload."""
        wanted = self.policies
        outcomes = {
            name: tuple(self._run(plan, name, seed, watch) for seed in self.seeds)
            for name in self.run_policies()
        }
        notes: dict[str, str] = {}
        if TUNED in wanted:
            best = min(TUNED_FROM, key=lambda name: _mean_of(outcomes[name]))
            outcomes[TUNED] = tuple(replace(outcome, policy=TUNED) for outcome in outcomes[best])
            notes[TUNED] = f"{best} is the best scale here"
        reference = SHIPPED if SHIPPED in wanted else wanted[0]
        order = [reference, *(name for name in wanted if name != reference)]
        compared = (_compare_policy(name, outcomes, reference, notes) for name in order)
        return Cell(plan, tuple(compared))

    def _run(self, plan: CellPlan, policy: str, seed: int, watch: Watch | None) -> Outcome:
        run = SimulatedRun(self.fleet, policy, seed, plan.arrivals(seed), self.conditions)
        if watch is None:
            return run.play()
        return run.play(lambda turns, now_s: watch(plan, policy, seed, turns, now_s))

    def as_json(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Return the study and its figures as plain data; equal studies give equal data."""
        conditions = self.conditions
        return {
            "format": FORMAT,
            "fleet": self.fleet.name,
            "nodes": self.fleet.count,
            "seeds": list(self.seeds),
            "faults": [
                {"kind": f.kind.value, "node": f.node, "at_s": f.at_s, "lasts_s": f.lasts_s}
                for f in conditions.faults
            ],
            "wrong_speeds": conditions.wrong_speeds,
            "slow_links": conditions.slow_links,
            "cells": [cell.as_json() for cell in cells],
        }


def _round_s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _mean_of(outcomes: Sequence[Outcome]) -> float:
    return geometric_mean([outcome.ttft_mean_s for outcome in outcomes])


def _compare_policy(
    policy: str,
    outcomes: Mapping[str, tuple[Outcome, ...]],
    reference: str,
    notes: Mapping[str, str],
) -> Compared:
    values, reference_values = outcomes[policy], outcomes[reference]
    means, p95s = _values(values, "ttft_mean_s"), _values(values, "ttft_p95_s")
    return Compared(
        policy,
        values,
        interval(means),
        interval(p95s),
        ratio(means, _values(reference_values, "ttft_mean_s")),
        ratio(p95s, _values(reference_values, "ttft_p95_s")),
        notes.get(policy, ""),
    )


def _values(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [getattr(outcome, name) for outcome in outcomes]


def overall(cells: Sequence[Cell]) -> dict[str, tuple[float, float]]:
    """Return each policy's mean and p95 over the reference's, as geometric means over cells."""
    ratios: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        for each in cell.compared:
            both = (each.mean_ratio.mean, each.p95_ratio.mean)
            ratios.setdefault(each.policy, []).append(both)
    return {
        policy: (
            geometric_mean([mean for mean, _ in pairs]),
            geometric_mean([p95 for _, p95 in pairs]),
        )
        for policy, pairs in ratios.items()
    }
