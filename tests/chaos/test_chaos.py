"""A real fabric keeps its promises while its processes die and its disks fail."""

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
def test_minutes_of_faults(tmp_path, seed):
    report = run(tmp_path, seed, 5.0, say=print)
    assert report.violations == []
    assert report.answers > len(report.faults)
    assert report.memories_judged


JUDGES = ("right answers", "erased", "owners", "right answers")


@pytest.mark.parametrize(("plant", "judge"), [*zip(PLANTS, JUDGES, strict=True)])
def test_a_judge_finds_what_it_is_for(tmp_path, plant, judge):
    kind, minutes = ("fail device", 1.0) if plant == UNSEEN else ("kill node", 0.2)
    report = run(tmp_path, 1, minutes, only=kind, plant=plant, say=print)
    assert judge in {violation.judge for violation in report.violations}


def test_no_wrong_word_is_said_while_devices_fail(tmp_path):
    report = run(tmp_path, 4, 2.0, only="fail device", say=print)
    assert report.violations == []
    assert report.answers > len(report.faults)
    assert report.refusals, "clients were asked to come again"
