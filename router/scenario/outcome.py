"""Outcome of a run as plain data: transcripts, verdicts, figures and savings."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from fabric.codec import to_plain
from router.scenario.expectations import Verdict
from router.scenario.report import Saving, rows, savings
from router.scenario.run import ScenarioRun
from router.scenario.series import COLD, WARM, ArmRun
from router.scenario.transcript import ordered_transcript


def failed_verdicts(arms: Iterable[ArmRun]) -> list[Verdict]:
    """Return the verdicts that count and do not hold."""
    return [
        verdict
        for arm in arms
        for phase, verdicts in arm.run.verdicts.items()
        for verdict in verdicts
        if not verdict.holds and _counts(arm, phase, verdict)
    ]


def _counts(arm_run: ArmRun, phase_id: str, verdict: Verdict) -> bool:
    """Return whether a verdict counts: in a cold arm nothing is cached or edited."""
    phases = takewhile(lambda phase: phase.id != phase_id, arm_run.run.scenario.phases)
    before = (*phases, arm_run.run.scenario.phase(phase_id))
    is_edited = any(phase.directives for phase in before)
    return arm_run.arm.kind != COLD or not (is_edited or verdict.is_of_cache)


def series_savings(arm_runs: Iterable[ArmRun]) -> Iterator[Saving]:
    """Yield the savings of each warm arm over its cold one."""
    arms: dict[int, dict[str, ScenarioRun]] = {}
    for each in arm_runs:
        arms.setdefault(each.arm.number, {})[each.arm.kind] = each.run
    for runs in arms.values():
        if COLD in runs and WARM in runs:
            yield from savings(runs[WARM].state, runs[COLD].state)


def outcome_row(arm_runs: Sequence[ArmRun]) -> dict[str, Any]:
    """Return all arms' transcripts, verdicts and reports, and the savings."""
    return {
        "runs": [_arm_row(each) for each in arm_runs],
        "savings": [to_plain(saving) for saving in series_savings(arm_runs)],
    }


def _arm_row(arm_run: ArmRun) -> dict[str, Any]:
    state = arm_run.run.state
    # Turns that run in parallel end in any order.
    transcript = ordered_transcript(state.scenario, state.transcript.values())
    return {
        "number": arm_run.arm.number,
        "arm": arm_run.arm.kind,
        "transcript": [to_plain(utterance) for utterance in transcript.values()],
        "verdicts": {
            phase: [
                {
                    "holds": v.holds,
                    "expected": v.expected,
                    "found": v.found,
                    "counts": _counts(arm_run, phase, v),
                }
                for v in verdicts
            ]
            for phase, verdicts in arm_run.run.verdicts.items()
        },
        "report": [to_plain(row) | {"cached_share": row.cached_share} for row in rows(state)],
    }
