"""`macfabric bench`: its list, its programs, its output and exit status."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.mlx import backend
from router.cli import bench
from router.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
OURS = {"decode", "interleave", "perplexity"}

# A benchmark whose figure is an argument; the limit is 1.
FAKE = '''
"""A fake."""

import os
import signal
import sys
import time

from benchmarks.report import Limit, Report

DESCRIPTION = "returns the figure that it is given"


def add_arguments(parser):
    parser.add_argument("--figure", type=float, default=1.0)
    parser.add_argument("--then", choices=["die", "hang"])


def run(arguments):
    if arguments.then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if arguments.then == "hang":
        print(os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    limit = Limit("the figure", arguments.figure, 1.0, is_least=True)
    parameters = {"quick": arguments.quick}
    return Report(parameters, {"t": {"row": {"column": 2.5}}}, {"r": 0.5}, (limit,), ("a note",))
'''


@pytest.fixture
def run(capfd):
    """Run `macfabric bench`; return exit status, standard output and standard error."""

    def call(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            status = main(["bench", *argv])
        except SystemExit as ended:
            status = ended.code
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a fake benchmark in the place of ours."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("__main__.py", "report.py"):
        shutil.copy(ROOT / "benchmarks" / name, folder)
    (folder / "fake.py").write_text(FAKE)
    monkeypatch.setattr(bench, "FOLDER", folder)
    return folder


def test_list_names_and_describes_benchmarks(run):
    status, text, _ = run("--list")
    listed = json.loads(run("--list", "--json")[1])

    assert status == 0
    assert set(listed) >= OURS
    assert [line.split()[0] for line in text.splitlines()] == sorted(listed)
    assert all(description in text for description in listed.values())
    assert run()[:2] == (0, text)


def test_listed_benchmarks_have_entry_points(run):
    for name in json.loads(run("--list", "--json")[1]):
        assert "_" not in name, "as docs/benchmarks.md spells it"
        tree = ast.parse((ROOT / "benchmarks" / f"{name.replace('-', '_')}.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

        assert {"add_arguments", "run"} <= functions, name


def test_help_describes_one_benchmark(run, fake):
    status, out, _ = run("fake", "--help")

    assert status == 0
    assert "macfabric bench fake" in out
    assert "returns the figure that it is given" in out
    assert all(option in out for option in ("--json", "--quick", "--figure"))


@pytest.mark.parametrize("argv", [("fly",), ("--json", "fly"), ("fake", "--unknown")])
def test_misuse_exits_with_2(run, fake, argv):
    status, out, err = run(*argv)

    assert (status, out) == (2, "")
    assert "fake" in err


def test_missing_checkout_is_an_error(run, fake):
    shutil.rmtree(fake)
    status, out, err = run("fake")

    assert (status, out) == (1, "")
    assert "source checkout" in err


@pytest.mark.parametrize(("figure", "status"), [("1.0", 0), ("0.99", 1), ("nan", 1)])
def test_missed_limit_exits_with_1(run, fake, figure, status):
    found, out, _ = run("--json", "fake", "--figure", figure)
    record = json.loads(out)
    shown, text, _ = run("fake", "--figure", figure)

    assert found == shown == status
    assert record["met"] is record["limits"][0]["met"] is (status == 0)
    assert record["parameters"] == {"quick": False}
    assert ("MISSED" in text) is (status == 1)
    assert all(part in text for part in ("column", "2.5", "a note"))


@pytest.mark.parametrize("name", ["fake_two", "fake-two"])
def test_quick_run_judges_no_limits(run, fake, name):
    (fake / "fake_two.py").write_text(FAKE)
    status, out, _ = run("--quick", "--json", name, "--figure", "0.5")
    record = json.loads(out)
    _, shown, _ = run("--quick", name, "--figure", "0.5")

    assert status == 0
    assert record["name"] == "fake-two"
    assert record["parameters"] == {"quick": True}
    assert record["met"] is record["limits"][0]["met"] is None
    assert "MISSED" not in shown
    assert any("not judged" in note for note in record["notes"])


def test_killed_benchmark_exits_with_1(run, fake):
    assert run("fake", "--then", "die")[0] == 1


def test_benchmark_is_terminated_with_the_command(fake):
    code = (
        "import sys; from pathlib import Path; from router.cli import bench, main;"
        "bench.FOLDER = Path(sys.argv[1]); sys.exit(main.main(sys.argv[2:]))"
    )
    argv = [sys.executable, "-c", code, str(fake), "bench", "fake", "--then", "hang"]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True) as command:
        child = int(command.stderr.readline())
        command.send_signal(signal.SIGTERM)
        status = command.wait(60)

    assert status == 1
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.nightly
def test_real_benchmark_prints_json(run):
    status, out, err = run("perplexity", "--quick", "--json", "--windows", "1")
    record = json.loads(out)

    assert status == 0
    assert "window 1 of 1" in err
    assert set(record) == {
        *("name", "environment", "parameters", "figures", "ratios", "limits", "notes", "met")
    }
    assert record["name"] == "perplexity"
    assert record["environment"]["backend"] == backend.current().name
    assert record["parameters"]["windows"] == 1
    cache = record["figures"]["cache"]
    full = cache["full precision"]["perplexity"]
    assert 5 < full < 200  # a model that learned nothing has 2,048
    for kind, row in cache.items():
        if kind != "full precision":
            ratio = record["ratios"][f"perplexity, {kind}, over full"]
            assert ratio == pytest.approx(row["perplexity"] / full)
            assert 100 * (ratio - 1) == pytest.approx(row["added_percent"])
    assert {limit["met"] for limit in record["limits"]} <= {None}
