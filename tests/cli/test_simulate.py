"""`macfabric simulate`: its options, output, files and exit status."""

import json

import pytest

from router.cli.main import main
from router.simulate.__main__ import main as simulate


@pytest.fixture
def run(capfd):
    """Run `macfabric simulate`; return exit status, standard output and standard error."""

    def call(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            status = main(["simulate", *argv])
        except SystemExit as ended:
            status = ended.code
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return call


def test_simulate_prints_table_and_json_and_writes_files(run, tmp_path):
    page, picture = tmp_path / "page.html", tmp_path / "chart.png"
    arguments = (
        "W6",
        "--sessions",
        "8",
        "--seeds",
        "2",
        "--policy",
        "seconds",
        "--policy",
        "sticky",
    )
    status, out, err = run(*arguments, "--html", str(page), "--png", str(picture))
    assert (status, "turns in" in err) == (0, True)
    assert [line.split()[2] for line in out.splitlines()[1:3]] == ["seconds", "sticky"]
    assert page.read_text().startswith("<!doctype html>")
    assert picture.read_bytes().startswith(b"\x89PNG")

    status, out, _ = run(*arguments, "--json", "--load", "0.5", "--load", "0.9")
    record = json.loads(out)
    assert status == 0
    assert [cell["load"] for cell in record["cells"]] == [0.5, 0.9]
    assert record["command"].startswith("macfabric simulate W6")


def test_simulate_plays_a_trace(run, tmp_path):
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    status, out, _ = run("--trace", str(tmp_path / "t.jsonl"), "--policy", "sticky", "--seeds", "1")

    assert status == 0
    assert out.splitlines()[1].startswith("t ")


def test_conditions_change_the_study_and_are_named_in_it(run):
    common = ("W8", "--sessions", "12", "--seeds", "1", "--first-seed", "4", "--json")
    _, out, _ = run(*common)
    plain = json.loads(out)
    assert plain["seeds"] == [4]
    for options, name, value in (
        (("--wrong-speeds", "0.5-2"), "wrong_speeds", [0.5, 2.0]),
        (("--slow-links", "8"), "slow_links", 8.0),
        (
            ("--fault", "slow:pro@1+30x4"),
            "faults",
            [{"kind": "slow", "node": "pro", "at_s": 1.0, "lasts_s": 30.0}],
        ),
    ):
        status, out, err = run(*common, *options)
        assert status == 0, err
        changed = json.loads(out)
        assert changed[name] == value
        assert options[0] in changed["command"]
        if name != "slow_links":  # this workload may ship nothing
            assert changed["cells"] != plain["cells"], name


def test_speedup_divides_the_times_of_a_trace(run, tmp_path):
    rows = [
        {"timestamp": at, "input_length": 600, "output_length": 5, "hash_ids": [at, 2]}
        for at in (0, 60_000)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("--trace", str(tmp_path / "t.jsonl"), "--policy", "sticky", "--seeds", "1", "--json")
    lasted_s = []
    for speedup in ("1", "10"):
        _, out, _ = run(*common, "--speedup", speedup)
        [cell] = json.loads(out)["cells"]
        lasted_s.append(cell["policies"]["sticky"]["runs"][0]["simulated_s"])
    assert lasted_s[0] > 5 * lasted_s[1], lasted_s


def test_list_names_workloads_fleets_and_policies(run):
    status, out, _ = run("--list", "--json")

    assert status == 0
    assert set(json.loads(out)) == {"workloads", "fleets", "policies"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workloads": ["W99"]}, "no workload is called"),
        ({"fleet": "nowhere"}, "no fleet is called"),
        ({"policies": ["magic"]}, "no policy is called"),
        ({"faults": ["fire"]}, "is not a fault"),
        ({"faults": ["lose:other@3"]}, "the fleet has no node"),
        ({"trace": "no/such/file"}, "no/such/file: No such file"),
        ({"trace": "x", "workloads": ["W1"]}, "a trace has its own turns"),
    ],
)
def test_unknown_name_is_a_one_line_error(changes, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simulate", json.dumps(changes)])
    status, printed = simulate(), capsys.readouterr()

    assert (status, printed.out) == (1, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_failure_exits_with_1(run):
    status, out, err = run("W99")

    assert (status, out) == (1, "")
    assert err.startswith("macfabric: no workload is called 'W99'")


@pytest.mark.parametrize("argv", [("--load", "0"), ("--seeds", "none"), ("--sessions", "0")])
def test_misuse_exits_with_2(run, argv):
    status, out, err = run(*argv)

    assert (status, out) == (2, "")
    assert argv[0] in err
