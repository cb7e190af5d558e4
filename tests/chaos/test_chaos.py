"""A real fabric keeps its promises while its processes die and its disks fail."""

import sys

import pytest

from tests.chaos.run import PLANTS, run

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


@pytest.mark.parametrize(
    ("plant", "judge"), [*zip(PLANTS, ("right answers", "erased", "owners"), strict=True)]
)
def test_a_judge_finds_what_it_is_for(tmp_path, plant, judge):
    report = run(tmp_path, 1, 0.2, only="kill node", plant=plant, say=print)
    assert judge in {violation.judge for violation in report.violations}
