"""`bench shipped-head` over links shaped by the kernel: which heads are fetched, at any speed."""

import json
import subprocess
import sys

import pytest

from benchmarks.namespaces import missing_requirement

pytestmark = [pytest.mark.slow, pytest.mark.privileged]


@pytest.mark.nightly  # beside five other test processes, its slowest link may stay unmeasured
@pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))
def test_beginning_is_fetched_over_a_fast_link_and_computed_beside_a_slow_one():
    command = [sys.executable, "-m", "benchmarks", "shipped-head", "--quick", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)

    counted = [limit for limit in report["limits"] if "fetched" in limit["statement"]]
    assert len(counted) == 2
    for limit in counted:
        sign = 1 if limit["is_least"] else -1
        assert sign * limit["figure"] >= sign * limit["bound"], limit
