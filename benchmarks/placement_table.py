"""Tables of `benchmarks/results/placement.md` from the output of `macfabric simulate --json`.

`python -m benchmarks.placement_table FILE...` joins the seeds of all files. A policy that moves no
memory has the same figures at any rate of the links, so one file has it for all of them. If all
scales of Dynamo's cost were run, the best one of each workload and load counts.
"""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.simulate.catalog import OWNER_ALWAYS, SHIPPED, TUNED, TUNED_FROM
from router.simulate.statistics import Interval, geometric_mean, interval, ratio

OWN_COLUMNS = ("workload", "load", "mean s", "p95 s", "moves per turn", "moved GB")
MEAN, P95 = "ttft_mean_s", "ttft_p95_s"

Cell = tuple[str, float]  # workload and load
Run = dict[str, Any]


@dataclass(slots=True)
class Studies:
    """Runs of all files: of the shipped placement by link, and of the others."""

    shipped: dict[str, dict[Cell, dict[int, Run]]] = field(default_factory=dict)
    others: dict[str, dict[Cell, dict[int, Run]]] = field(default_factory=dict)

    def add(self, plain: dict[str, Any]) -> None:
        """Add the output of one command."""
        words = plain["command"].split()
        link = words[words.index("--link-mbit") + 1]
        for cell in plain["cells"]:
            key = cell["workload"], cell["load"]
            for policy, figures in cell["policies"].items():
                name = link if policy == SHIPPED else policy
                of_policy = self.shipped if policy == SHIPPED else self.others
                runs = of_policy.setdefault(name, defaultdict(dict))[key]
                runs.update({run["seed"]: run for run in figures["runs"]})

    @property
    def policies(self) -> list[str]:
        """The other policies, those with most to compare first."""
        tuned = [TUNED] if set(TUNED_FROM) <= self.others.keys() else []
        scales = [] if tuned else [name for name in self.others if name in TUNED_FROM]
        rest = [name for name in self.others if name not in (OWNER_ALWAYS, *TUNED_FROM)]
        return [*(n for n in (OWNER_ALWAYS,) if n in self.others), *rest, *tuned, *scales]

    def values(self, runs: dict[int, Run], name: str, seeds: Sequence[int]) -> list[float]:
        """Return one figure of a policy's runs by seed."""
        return [runs[seed][name] for seed in seeds]

    def other(self, policy: str, cell: Cell, seeds: Sequence[int]) -> dict[int, Run]:
        """Return the runs of a policy in a cell; for the tuned policy, those of its best scale."""
        if policy != TUNED:
            return self.others[policy][cell]
        scales = [self.others[name][cell] for name in TUNED_FROM]
        return min(scales, key=lambda runs: geometric_mean(self.values(runs, MEAN, seeds)))


def tables(studies: Studies) -> Iterator[str]:
    """Yield the lines of one table for each link."""
    others = studies.policies
    columns = (*OWN_COLUMNS, *others)
    for link, cells, seeds in _links(studies):
        yield f"## Links of {link}"
        yield f"Seeds {', '.join(map(str, seeds))}."
        yield ""
        yield _line(columns)
        yield "|---" * len(columns) + "|"
        means: dict[str, list[tuple[float, float]]] = {policy: [] for policy in others}
        losses: list[str] = []
        for cell in sorted(cells):
            own = cells[cell]
            ratios = {p: _ratios(studies, p, cell, own, seeds) for p in others}
            for policy, (mean, p95) in ratios.items():
                means[policy].append((mean.mean, p95.mean))
                losses += _losses(policy, cell, mean, p95)
            yield _line([*_own(studies, cell, own, seeds), *map(_shown, ratios.values())])
        overall = [_overall(means[policy]) for policy in others]
        yield _line(["geometric mean", *[""] * (len(OWN_COLUMNS) - 1), *overall])
        yield ""
        yield from losses or ["No other policy is faster in any cell."]
        yield ""


def gains(studies: Studies) -> Iterator[str]:
    """Yield the lines of a table of `owner-always` over the placement, by workload and link."""
    before = studies.others[OWNER_ALWAYS]
    workloads = sorted({workload for workload, _ in before})
    yield _line(("link", *workloads))
    yield "|---" * (len(workloads) + 1) + "|"
    for link, cells, seeds in _links(studies):
        means: dict[str, list[tuple[float, float]]] = {workload: [] for workload in workloads}
        for cell, own in cells.items():
            mean, p95 = _ratios(studies, OWNER_ALWAYS, cell, own, seeds)
            means[cell[0]].append((mean.mean, p95.mean))
        overall = (_overall(means[workload]) for workload in workloads)
        yield _line((link, *overall))


def _links(studies: Studies) -> Iterator[tuple[str, dict[Cell, dict[int, Run]], list[int]]]:
    """Yield each link's rate, the placement's runs on it, and the seeds that all policies have."""
    for link, cells in sorted(studies.shipped.items(), key=lambda each: float(each[0])):
        yield f"{float(link) / 1_000:g} Gbit/s", cells, sorted(_common_seeds(studies, cells))


def _common_seeds(studies: Studies, cells: dict[Cell, dict[int, Run]]) -> set[int]:
    """Return the seeds that all policies have in all cells."""
    every = [*cells.values()]
    every += [runs for of_policy in studies.others.values() for runs in of_policy.values()]
    return set.intersection(*(set(runs) for runs in every))


def _overall(ratios: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"{geometric_mean(each):.2f}" for each in zip(*ratios, strict=True))


def _ratios(
    studies: Studies, policy: str, cell: Cell, own: dict[int, Run], seeds: Sequence[int]
) -> tuple[Interval, Interval]:
    other = studies.other(policy, cell, seeds)
    pairs = ((studies.values(other, n, seeds), studies.values(own, n, seeds)) for n in (MEAN, P95))
    mean, p95 = (ratio(theirs, ours) for theirs, ours in pairs)
    return mean, p95


def _own(studies: Studies, cell: Cell, own: dict[int, Run], seeds: Sequence[int]) -> Iterable[str]:
    workload, load = cell
    mean, p95 = (interval(studies.values(own, name, seeds)) for name in (MEAN, P95))
    moves, turns = (sum(studies.values(own, name, seeds)) for name in ("moves", "turns"))
    moved = sum(studies.values(own, "moved_bytes", seeds)) / len(seeds) / 1e9
    shown = f"{mean.mean:.2f}", f"{p95.mean:.2f}", f"{moves / turns:.3f}", f"{moved:.1f}"
    return (workload, f"{load:.0%}", *shown)


def _shown(both: tuple[Interval, Interval]) -> str:
    mean, p95 = both
    return f"{mean.mean:.2f} ({mean.low:.2f}-{mean.high:.2f}), {p95.mean:.2f}"


def _losses(policy: str, cell: Cell, mean: Interval, p95: Interval) -> Iterator[str]:
    for name, each in (("mean", mean), ("p95", p95)):
        if each.mean < 1:
            bounds = f"{each.mean:.3f} ({each.low:.3f}-{each.high:.3f})"
            yield f"- {cell[0]} at {cell[1]:.0%}, {policy}, {name}: {bounds}"


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def main(paths: Sequence[str]) -> None:
    """Print the tables, then each file's command and hash."""
    studies = Studies()
    for path in paths:
        studies.add(json.loads(Path(path).read_text()))
    print("\n".join(tables(studies)))
    if OWNER_ALWAYS in studies.others:
        print("\n".join(gains(studies)), end="\n\n")
    for path in paths:
        raw = Path(path).read_bytes()
        print(json.loads(raw)["command"], hashlib.sha256(raw).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1:])
