"""`make bench-smoke`: run every benchmark for seconds, and report the figures that got worse.

Only figures with limits are compared: ratios and counts of one run, which a slow or busy machine
affects less than seconds. A figure that is worse than the committed one by more than a tolerance is
measured again, and the better of both counts.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import list_benchmarks
from benchmarks.report import say

COMMITTED = Path(__file__).resolve().parent / "results" / "smoke.json"
ROOT = COMMITTED.parents[2]
TOLERANCE = 1.5
LEFT_OUT = {"shipped-head", "transfer"}  # need root, and emulated Macs or links
RUN_S = 900.0
WORSE = 1

Limits = dict[str, dict[str, Any]]  # by their statement


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return exit status 1 if a figure got worse or a benchmark failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks (default: all)")
    parser.add_argument("--update", action="store_true", help="commit what is measured instead")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="default: 1.5")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    names = arguments.names or sorted(set(list_benchmarks()) - LEFT_OUT)
    committed: dict[str, Limits] = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    problems: list[str] = []
    for number, name in enumerate(names, start=1):
        say(f"{number} of {len(names)}: {name}")
        measured = _measured(name)
        if measured is None:
            problems.append(f"{name}: it failed")
        elif arguments.update:
            committed[name] = measured
        else:
            problems += _judged(name, committed.get(name, {}), measured, arguments.tolerance)
    if arguments.update:
        COMMITTED.write_text(json.dumps(committed, indent=1, sort_keys=True) + "\n")
    if arguments.json:
        print(json.dumps({"benchmarks": names, "worse": problems}))
    else:
        print("\n".join(problems) or f"{len(names)} benchmarks, none worse")
    return WORSE if problems else 0


def _measured(name: str) -> Limits | None:
    """Return the limits of a short run; None if it failed."""
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json"]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"{name} took longer than {RUN_S:.0f} s")
        return None
    if ran.returncode:
        say(ran.stderr[-1000:])
        return None
    return {each["statement"]: each for each in json.loads(ran.stdout)["limits"]}


def _judged(name: str, committed: Limits, measured: Limits, tolerance: float) -> list[str]:
    """Return the figures that are worse in both measurements."""
    if not set(worse(committed, measured, tolerance)):
        return []
    say(f"{name}: measuring again")
    again = _measured(name) or {}
    return [f"{name}: {each}" for each in worse(committed, better(measured, again), tolerance)]


def better(first: Limits, second: Limits) -> Limits:
    """Return the better of two figures for each limit."""
    chosen: Limits = {}
    for statement, limit in first.items():
        other = second.get(statement, limit)
        figures = [each["figure"] for each in (limit, other) if each["figure"] is not None]
        best = (max if limit["is_least"] else min)(figures, default=None)
        chosen[statement] = {**limit, "figure": best}
    return chosen


def worse(
    committed: Mapping[str, Mapping[str, Any]],
    measured: Mapping[str, Mapping[str, Any]],
    tolerance: float,
) -> Iterable[str]:
    """Yield the figures that are worse than the committed ones, with both."""
    for statement, then in committed.items():
        now = measured.get(statement)
        if now is None:
            yield f"{statement}: no longer measured"
            continue
        before, figure = then["figure"], now["figure"]
        if before is None:
            continue
        is_worse = figure is None or (
            figure < before / tolerance if then["is_least"] else figure > before * tolerance
        )
        if is_worse:
            shown = "nothing" if figure is None else f"{figure:.4g}"
            yield f"{statement}: {shown}, was {before:.4g}"


if __name__ == "__main__":
    sys.exit(main())
