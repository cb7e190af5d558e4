"""A real fabric keeps its guarantees while its processes die and its disks fail."""

import sys

import pytest

from tests.chaos.run import PLANTS, UNSEEN, run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="finds Ray's processes in /proc"
    ),
]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fabric_keeps_its_promises_under_faults(tmp_path, seed):
    report = run(tmp_path, seed, 5.0, report_line=print)
    assert report.violations == []
    assert report.answers > len(report.faults)
    assert report.memories_judged


JUDGES = ("right answers", "erased", "owners", "right answers")


@pytest.mark.parametrize(("plant", "judge"), [*zip(PLANTS, JUDGES, strict=True)])
def test_judges_detect_planted_violations(tmp_path, plant, judge):
    kind, minutes = ("fail device", 1.0) if plant == UNSEEN else ("kill node", 0.2)
    report = run(tmp_path, 1, minutes, only=kind, plant=plant, report_line=print)
    assert judge in {violation.judge for violation in report.violations}


def test_answers_stay_right_while_devices_fail(tmp_path):
    report = run(tmp_path, 4, 2.0, only="fail device", report_line=print)
    assert report.violations == []
    assert report.answers > len(report.faults)
    assert report.refusals, "no client had to retry"
