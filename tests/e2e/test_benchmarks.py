"""Every benchmark runs to its end, so that none rots between the days when somebody measures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import found

ROOT = Path(__file__).resolve().parents[2]
PRIVILEGED = {"transfer"}  # needs emulated Macs; tests/e2e/test_bench_transfer.py runs it
MARKS = {
    "contract": [pytest.mark.nightly],
    "decode": [pytest.mark.slow, pytest.mark.nightly],
    "interleave": [pytest.mark.slow, pytest.mark.nightly],
    "memory": [pytest.mark.slow, pytest.mark.nightly],
    "migrate": [pytest.mark.slow, pytest.mark.nightly, pytest.mark.cluster],
    "moved-runs": [pytest.mark.nightly],
    "perplexity": [pytest.mark.nightly],
    "restore": [pytest.mark.nightly],
    "soak": [pytest.mark.slow, pytest.mark.nightly],
    "span-agreement": [pytest.mark.nightly],
    "spans": [pytest.mark.nightly],
    "turn-save": [pytest.mark.slow, pytest.mark.nightly],
}
HANG_S = 540


def test_every_benchmark_is_known_here_and_in_the_documents():
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    assert set(MARKS) | PRIVILEGED <= set(found())
    assert all(f"| `{name}` |" in text for name in found())


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=MARKS.get(n, ())) for n in found() if n not in PRIVILEGED]
)
def test_a_quick_run(name, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--quick", "--json"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert record["name"] == name
    assert record["figures"]
    assert record["met"] is None, "nobody judges what a busy machine did in seconds"
