"""Tables and transcripts of runs."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from router.cli.output import human_bytes, human_count, print_table
from router.cli.terminal import print_line
from router.scenario.report import ReportRow, Saving

_COLUMNS = ("phase", "agent", "answers", "ttft s", "min", "max", "cached", "of", "moved", "nodes")


def print_report(title: str, rows: Iterable[ReportRow]) -> None:
    """Print a row for each agent of each phase."""
    cells = [
        (
            row.phase,
            row.agent,
            row.answers,
            f"{row.ttft_median_s:.3f}",
            f"{row.ttft_min_s:.3f}",
            f"{row.ttft_max_s:.3f}",
            f"{row.cached_share:.1%}",
            human_count(row.prompt_tokens),
            human_bytes(row.moved_bytes),
            ", ".join(row.nodes),
        )
        for row in rows
    ]
    print_table(title, _COLUMNS, cells)


def print_transcripts(runs: Iterable[Mapping[str, Any]]) -> None:
    """Print each arm's transcript with the tools that agents called."""
    for run in runs:
        print_line(f"{run['arm']} {run['number']}")
        phase = None
        for turn in run["transcript"]:
            if turn["phase"] != phase:
                phase = turn["phase"]
                print_line(f"  {phase}")
            names = [call["name"] for step in turn["steps"] for call in step["calls"]]
            called = f" (calls {', '.join(names)})" if names else ""
            first, *rest = turn["text"].strip().split("\n")
            print_line(f"    {turn['speaker']}{called}: {first}")
            for line in rest:
                print_line(f"      {line}")


def print_unmet(runs: Iterable[Mapping[str, Any]]) -> int:
    """Print the expectations that count and do not hold; return their number."""
    count = 0
    for run in runs:
        for phase, verdicts in run["verdicts"].items():
            for verdict in verdicts:
                if verdict["counts"] and not verdict["holds"]:
                    count += 1
                    print_line(f"does not hold: {phase}: {verdict['expected']}: {verdict['found']}")
    return count


def print_savings(savings: Sequence[Saving]) -> None:
    """Print the cold-to-warm ratios of latency: medians over all repetitions, and their range."""
    by_phase: dict[str | None, list[Saving]] = defaultdict(list)
    for saving in savings:
        by_phase[saving.phase].append(saving)
    if not by_phase:
        return
    cells = [
        (
            phase or "all",
            _spread([s.ttft for s in repeated]),
            _spread([s.total for s in repeated]),
            _share([s.cold_cached_share for s in repeated]),
        )
        for phase, repeated in by_phase.items()
    ]
    head = ("phase", "first token", "whole answers", "cached in the cold run")
    print_table("cold / warm", head, cells)


def _share(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{median(known):.0%}" if known else "-"


def _spread(ratios: Sequence[float]) -> str:
    middle = f"{median(ratios):.2f}x"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f}-{max(ratios):.2f})"
