"""Tables of what runs cost."""

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
    """Print what was said, and by which tools' help, of each performance."""
    for run in runs:
        print_line(f"{run['arm']} {run['number']}")
        phase = None
        for said in run["transcript"]:
            if said["phase"] != phase:
                phase = said["phase"]
                print_line(f"  {phase}")
            names = [call["name"] for step in said["steps"] for call in step["calls"]]
            called = f" (calls {', '.join(names)})" if names else ""
            first, *rest = said["text"].strip().split("\n")
            print_line(f"    {said['speaker']}{called}: {first}")
            for line in rest:
                print_line(f"      {line}")


def print_unmet(runs: Iterable[Mapping[str, Any]]) -> None:
    """Print what does not hold of what counts."""
    for run in runs:
        for phase, verdicts in run["verdicts"].items():
            for verdict in verdicts:
                if verdict["counts"] and not verdict["holds"]:
                    print_line(f"does not hold: {phase}: {verdict['expected']}: {verdict['found']}")


def print_savings(found: Sequence[Saving]) -> None:
    """Print how many cold seconds a warm one is worth: medians of all repetitions, and spread."""
    by_phase: dict[str | None, list[Saving]] = defaultdict(list)
    for saving in found:
        by_phase[saving.phase].append(saving)
    if not by_phase:
        return
    cells = [
        (
            phase or "all",
            _spread([s.ttft for s in several]),
            _spread([s.total for s in several]),
            _share([s.cold_cached_share for s in several]),
        )
        for phase, several in by_phase.items()
    ]
    head = ("phase", "first token", "whole answers", "cached in the cold run")
    print_table("cold / warm", head, cells)


def _share(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f"{median(known):.0%}" if known else "-"


def _spread(ratios: Sequence[float]) -> str:
    middle = f"{median(ratios):.2f}x"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f}-{max(ratios):.2f})"
