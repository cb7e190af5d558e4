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

from benchmarks import papers
from benchmarks.measured_cells import MeasuredCells
from benchmarks.saved_results import options_shown
from benchmarks.smoke import better, worse
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

from benchmarks.report import Chart, Limit, Report

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
    figures = {"t": {"row": {"column": 2.5}}}
    chart = Chart("A fake", "x", "seconds", {"line": [(1.0, 2.0, 1.5, 2.5), (2.0, 4.0, 3.0, 4.0)]})
    return Report(parameters, figures, {"r": 0.5}, (limit,), ("a note",), charts=(chart,))
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
    """Replace the benchmarks with a fake one."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("__main__.py", "report.py", "saved_results.py", "papers.py"):
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
    assert 5 < full < 200  # an untrained model has 2,048
    for kind, row in cache.items():
        if kind != "full precision":
            ratio = record["ratios"][f"perplexity, {kind}, over full"]
            assert ratio == pytest.approx(row["perplexity"] / full)
            assert 100 * (ratio - 1) == pytest.approx(row["added_percent"])
    assert {limit["met"] for limit in record["limits"]} <= {None}


def test_report_is_written_as_json_markdown_and_png(run, fake, tmp_path):
    folder = tmp_path / "results"
    status, out, _ = run("fake", "--json", "--report", str(folder))
    record = json.loads((folder / "fake.json").read_text())

    assert status == 0
    assert record == json.loads(out)
    assert record["command"] == "macfabric bench fake", "options of the output change no figure"
    assert record["environment"]["version"]
    page = (folder / "fake.md").read_text()
    assert "| row | 2.5 |" in page
    assert "the figure | 1 | ≥ 1 | met" in page
    image = (folder / "fake-1.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert "](fake-1.png)" in page

    (folder / "fake.md").unlink()
    assert run("--report", str(folder))[:2] == (0, "fake\n")
    assert (folder / "fake.md").read_text() == page
    assert (folder / "fake-1.png").read_bytes() == image, "the same figures, the same bytes"
    assert "not measured yet" in (folder / "papers.md").read_text()


def test_report_command_shows_options_that_change_figures(run, fake):
    argv = ("fake", "--json", "--quick", "--report=/tmp/elsewhere", "--figure", "2.0")
    assert options_shown(argv[1:]) == ["--quick", "--figure", "2.0"]


def test_file_of_measured_cells_is_no_part_of_a_command():
    argv = [
        "--keep",
        "cells.jsonl",
        "--quick",
        "--keep=more.jsonl",
        "--report",
        "out",
        "--rounds",
        "2",
    ]
    assert options_shown(argv) == ["--quick", "--rounds", "2"]


def test_cells_of_a_cut_run_are_kept_and_those_of_another_are_not(tmp_path):
    path = tmp_path / "cells.jsonl"
    first = MeasuredCells(path, {"rounds": 2})
    first.add("a", {"cold": [1.5]})
    first.add("b", {"cold": [2.5]})
    with first.until_interrupted():
        raise KeyboardInterrupt
    first.finish()
    text = path.read_text()
    path.write_text(text[:-4])  # the last line, as a kill leaves it

    second = MeasuredCells(path, {"rounds": 2})
    assert second.get("a") == {"cold": [1.5]}
    assert "b" not in second
    second.add("b", {"cold": [3.5]})
    assert MeasuredCells(path, {"rounds": 2}).get("b") == {"cold": [3.5]}
    assert MeasuredCells(path, {"rounds": 3}).get("a") is None, "other parameters"
    last = MeasuredCells(path, {"rounds": 3})
    last.finish()
    assert not path.exists()


def test_terminated_run_is_marked_as_interrupted(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    cells = MeasuredCells(tmp_path / "cells.jsonl", {})
    with cells.until_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    assert cells.is_interrupted
    assert signal.getsignal(signal.SIGTERM) == before


def judged(figure, *, is_least=True):
    return {"the figure": {"statement": "the figure", "figure": figure, "is_least": is_least}}


@pytest.mark.parametrize(
    ("before", "figure", "is_least", "is_worse"),
    [
        (3.0, 2.1, True, False),
        (3.0, 1.9, True, True),
        (3.0, 9.0, True, False),
        (1.0, 1.4, False, False),
        (1.0, 1.6, False, True),
        (0.0, 1.0, False, True),
        (1.0, None, False, True),
        (None, 1.0, True, False),
    ],
)
def test_worse_figures_are_named_with_both_values(before, figure, is_least, is_worse):
    then, now = judged(before, is_least=is_least), judged(figure, is_least=is_least)
    named = list(worse(then, now, 1.5))

    assert bool(named) == is_worse
    assert all("the figure" in each and f"was {before:.4g}" in each for each in named)


def test_better_of_two_runs_counts():
    assert better(judged(1.0), judged(2.0))["the figure"]["figure"] == 2.0
    assert better(judged(1.0, is_least=False), judged(2.0))["the figure"]["figure"] == 1.0
    assert better(judged(None), judged(2.0))["the figure"]["figure"] == 2.0
    assert list(worse(judged(1.0), {}, 1.5)) == ["the figure: no longer measured"]


def test_papers_page_shows_our_figures_where_they_are_measured():
    seconds = {"4096": {"cold": 40.0, "hot": 0.5, "disk": 0.8}}
    ttft = {"figures": {"seconds to the first token, 1 at once": seconds}}
    text = papers.page({"ttft": ttft})

    assert "| Gemma 3 27x, DeepSeek 15x, Llama 35x | 40 s / 0.8 s = 50x |" in text
    assert "| Gemma 3 22x, DeepSeek 11x, Llama 24x | 40 s / 0.5 s = 80x |" in text
    assert text.count("not measured yet") == papers.page({}).count("not measured yet") - 2
