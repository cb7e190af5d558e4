"""What came of a run, as plain data: transcripts, verdicts, figures and savings."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fabric.codec import to_plain
from router.scenario.expectations import Verdict
from router.scenario.report import Saving, rows, savings
from router.scenario.run import ScenarioRun
from router.scenario.series import COLD, WARM, Performed


def failed_verdicts(performed: Iterable[Performed]) -> list[Verdict]:
    """List what does not hold; of cold arms, nothing about caches is expected."""
    return [
        verdict
        for each in performed
        for found in each.run.verdicts.values()
        for verdict in found
        if not verdict.holds and not (each.arm.kind == COLD and verdict.is_of_cache)
    ]


def series_savings(performed: Iterable[Performed]) -> Iterator[Saving]:
    """Yield what each warm performance saved against its cold one."""
    arms: dict[int, dict[str, ScenarioRun]] = {}
    for each in performed:
        arms.setdefault(each.arm.number, {})[each.arm.kind] = each.run
    for runs in arms.values():
        if COLD in runs and WARM in runs:
            yield from savings(runs[WARM].state, runs[COLD].state)


def outcome_row(performed: Sequence[Performed]) -> dict[str, Any]:
    """Show all performances, and what the warm ones saved."""
    return {
        "runs": [_performed_row(each) for each in performed],
        "savings": [to_plain(saving) for saving in series_savings(performed)],
    }


def _performed_row(each: Performed) -> dict[str, Any]:
    state = each.run.state
    return {
        "number": each.arm.number,
        "arm": each.arm.kind,
        "transcript": [to_plain(utterance) for utterance in state.said.values()],
        "verdicts": {
            phase: [
                {"holds": v.holds, "found": v.found, "about_cache": v.is_of_cache} for v in found
            ]
            for phase, found in each.run.verdicts.items()
        },
        "report": [to_plain(row) | {"cached_share": row.cached_share} for row in rows(state)],
    }
