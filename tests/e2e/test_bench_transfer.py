"""`bench transfer` between two emulated Macs: the pulled cable, at any speed of the machine."""

import json
import subprocess
import sys

import pytest

from benchmarks.emulated_fleet import missing_requirement

pytestmark = [pytest.mark.slow, pytest.mark.privileged]


@pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))
def test_pulled_cable_resends_no_verified_byte():
    command = [sys.executable, "-m", "benchmarks", "transfer", "--quick", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    report = json.loads(ran.stdout)

    assert {"1000 Mbit/s", "two of 1000 Mbit/s"} <= set(report["figures"]["links"])
    cut = [limit for limit in report["limits"] if limit["statement"].startswith("cut: ")]
    assert len(cut) == 3
    # No verified byte was sent twice, and little was lost in the dead link's buffers.
    for limit in cut[:2]:
        assert limit["figure"] <= limit["bound"], limit
