"""`macfabric logs`: lines of router and nodes, in order, by node, level and turn."""

import json

import pytest

from router.cli.data_folder import DataFolder
from router.cli.logs import LogTail

TURN = "req_12345678"


def line(at_s, process, message, **more):
    row = {"at_s": at_s, "level": "info", "process": process, "logger": "x", "message": message}
    return json.dumps(row | more) + "\n"


@pytest.fixture
def logs(tmp_path):
    folder = DataFolder(tmp_path / "data").logs
    folder.mkdir(parents=True)
    (folder / "router.jsonl").write_text(
        line(1.0, "router", "one", turn=TURN) + line(4.0, "router", "four", level="warning")
    )
    (folder / "node.node-a.jsonl").write_text(
        line(3.0, "node-a", "three", turn=TURN, error="ValueError", frames=["turn/turn.py:7"])
    )
    (folder / "node.node-a.jsonl.1").write_text(line(2.0, "node-a", "two"))
    return folder


def messages(out):
    return [json.loads(each)["message"] for each in out.splitlines()]


def test_lines_of_all_files_are_shown_in_order(run, logs):
    status, out, err = run("logs")
    assert (status, err) == (0, "")
    shown = [part for each in out.splitlines() for part in each.split() if part in
             {"one", "two", "three", "four"}]  # fmt: skip
    assert shown == ["one", "two", "three", "four"]
    assert f"three [{TURN}] (ValueError at turn/turn.py:7)" in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--turn", TURN], ["one", "three"]),
        (["--node", "node-a"], ["two", "three"]),
        (["--node", "router"], ["one", "four"]),
        (["--node", "router", "--node", "node-a", "--lines", "2"], ["three", "four"]),
        (["--level", "warning"], ["four"]),
        (["--turn", "req_unknown1"], []),
        (["--lines", "0"], []),
    ],
)
def test_lines_are_filtered(run, logs, options, expected):
    status, out, _ = run("logs", "--json", *options)
    assert (status, messages(out)) == (0, expected)


@pytest.mark.parametrize("option", ["-f", "--follow"])
def test_new_lines_are_followed_until_ctrl_c(run, logs, monkeypatch, option):
    def write_then_interrupt(_):
        if (logs / "node.node-b.jsonl").exists():
            raise KeyboardInterrupt
        (logs / "node.node-b.jsonl").write_text(line(9.0, "node-b", "five"))

    monkeypatch.setattr("router.cli.logs.time.sleep", write_then_interrupt)
    status, out, _ = run("logs", "--json", "--lines", "1", option)
    assert (status, messages(out)) == (0, ["four", "five"])


def test_terminal_controls_in_lines_are_escaped(run, logs):
    (logs / "router.jsonl").write_text(line(1.0, "router", "a\x1b[31mb\nc"))
    _, out, _ = run("logs", "--node", "router")
    assert "\x1b" not in out
    assert len(out.splitlines()) == 1


def test_logs_explains_why_there_are_none(run, tmp_path):
    status, _, err = run("logs")
    assert status == 1
    assert "macfabric up" in err
    folder = DataFolder(tmp_path / "data").logs
    folder.mkdir(parents=True)
    (folder / "router.txt").write_text("text\n")
    status, _, err = run("logs")
    assert (status, "log_format is text" in err) == (1, True)


def test_tail_reads_on_across_parts_of_lines_and_rotations(tmp_path):
    path = tmp_path / "node.a.jsonl"
    path.write_text(line(1.0, "a", "one"))
    tail = LogTail(path)
    assert [row["message"] for row in tail.all_rows()] == ["one"]
    with path.open("a") as file:
        file.write(line(2.0, "a", "two") + '{"message": "th')
    assert [row["message"] for row in tail.new_rows()] == ["two"]
    with path.open("a") as file:
        file.write('ree"}\n' + line(4.0, "a", "four"))
    path.rename(tmp_path / "node.a.jsonl.1")
    path.write_text(line(5.0, "a", "five"))
    assert [row["message"] for row in tail.new_rows()] == ["three", "four", "five"]
    assert list(tail.new_rows()) == []
    path.unlink()
    assert list(tail.new_rows()) == []
