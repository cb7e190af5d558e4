"""Run every benchmark with `--quick` in CI, so that none breaks unnoticed between measurements."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.__main__ import list_benchmarks, main

ROOT = Path(__file__).resolve().parents[2]
# On emulated Macs and links: tests/e2e/test_bench_transfer.py and test_bench_shipped_head.py.
EMULATED = {"shipped-head", "transfer"}
CLUSTER = {"demo", "migrate", "peers", "staggered", "ttft"}
OWN_PROCESS = CLUSTER | {"append", "soak"}  # they start processes, or measure this one's memory
HANG_S = 540
# Limits on counts, which a short run meets as well as a long one.
COUNTED = (
    "all recomputed",
    "answers that differ",
    "bytes of an unchanged heartbeat",
    "bytes that a turn adds",
    "bytes written",
    "cached share",
    "came twice",
    "contract holds",
    "copied by a step",
    "extra peak",
    "failed requests",
    "wrong answers",
    "graph nodes",
    "measured by computed",
    "memory still reserved",
    "problems found",
    "regret",
    "share of the history",
    "Q4/fp16",
)


def test_every_benchmark_is_documented():
    text = (ROOT / "docs" / "benchmarks.md").read_text()

    assert set(list_benchmarks()) >= EMULATED | CLUSTER
    assert all(f"| `{name}` |" in text for name in list_benchmarks())


def mark_cluster(name):
    return pytest.param(name, marks=pytest.mark.cluster) if name in CLUSTER else name


def check_record(name, text):
    record = json.loads(text)
    assert record["name"] == name
    assert record["figures"]
    assert record["met"] is None, "the speeds of a quick run are not judged"
    for limit in record["limits"]:
        if any(words in limit["statement"] for words in COUNTED):
            sign = 1 if limit["is_least"] else -1
            assert sign * limit["figure"] >= sign * limit["bound"], limit


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(list_benchmarks()) - EMULATED - OWN_PROCESS))
def test_quick_run_meets_counted_limits(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    assert main([name, "--quick", "--json"]) == 0
    check_record(name, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", [mark_cluster(name) for name in sorted(OWN_PROCESS)])
def test_quick_run_in_own_process_meets_counted_limits(name, tmp_path):
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
    check_record(name, ran.stdout)
