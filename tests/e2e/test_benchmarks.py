"""Run every benchmark with `--quick` in CI, so that none rots between measurements."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import found

ROOT = Path(__file__).resolve().parents[2]
EMULATED = {"transfer"}  # tests/e2e/test_bench_transfer.py runs it on emulated Macs
CLUSTER = {"migrate"}
HANG_S = 540


def test_every_benchmark_is_known_here_and_in_the_documents():
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    assert set(found()) >= EMULATED | CLUSTER
    assert all(f"| `{name}` |" in text for name in found())


def marked(name):
    return pytest.param(name, marks=pytest.mark.cluster) if name in CLUSTER else name


@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name) for name in found() if name not in EMULATED])
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
    assert record["met"] is None, "the figures of a quick run are not judged"
