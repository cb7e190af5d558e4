"""What came of a run, as plain data: transcripts, verdicts, figures and savings."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from fabric.codec import to_plain
from router.scenario.expectations import Verdict
from router.scenario.report import Saving, rows, savings
from router.scenario.run import ScenarioRun
from router.scenario.series import COLD, WARM, Performed
from router.scenario.utterance import by_turn


def failed_verdicts(performed: Iterable[Performed]) -> list[Verdict]:
    """List what does not hold of what counts."""
    return [
        verdict
        for each in performed
        for phase, found in each.run.verdicts.items()
        for verdict in found
        if not verdict.holds and _counts(each, phase, verdict)
    ]


def _counts(each: Performed, phase_id: str, verdict: Verdict) -> bool:
    """Say whether an expectation is one of this arm: in a cold one nothing is cached or edited."""
    phases = takewhile(lambda phase: phase.id != phase_id, each.run.scenario.phases)
    before = (*phases, each.run.scenario.phase(phase_id))
    is_edited = any(phase.directives for phase in before)
    return each.arm.kind != COLD or not (is_edited or verdict.is_of_cache)


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
    said = by_turn(state.scenario, state.said.values())  # and not as they happened to end
    return {
        "number": each.arm.number,
        "arm": each.arm.kind,
        "transcript": [to_plain(utterance) for utterance in said.values()],
        "verdicts": {
            phase: [
                {
                    "holds": v.holds,
                    "expected": v.expected,
                    "found": v.found,
                    "counts": _counts(each, phase, v),
                }
                for v in found
            ]
            for phase, found in each.run.verdicts.items()
        },
        "report": [to_plain(row) | {"cached_share": row.cached_share} for row in rows(state)],
    }
