"""The demo, whole: real Ray, three raylets, three nodes, the OpenAI SDK, kills and moves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO_TIMEOUT_S = 300


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.nightly
def test_demo_answers_and_claims_are_true() -> None:
    """`macfabric demo` succeeds and reports the source of each reuse."""
    ran = subprocess.run(
        [sys.executable, "-m", "router.cli.main", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
        cwd=Path(__file__).parents[2],
    )

    assert ran.returncode == 0, ran.stderr[-4000:]
    report = json.loads(ran.stdout)
    assert report["ok"]
    assert {"cold/hot", "cold/disk", "cold/peer"} == report["ratios"].keys()
    assert report["pulse"]["failures"] == []
