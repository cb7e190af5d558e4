"""`macfabric top`: its figures, its screen at any size, and its end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli.top.fleet_state import FleetState
from router.cli.top.report import figures, screen_lines
from router.client.http_api import ServerEvent
from router.limits import TOP_AGENTS_MAX, TOP_EVENTS_MAX, TOP_MOVES_MAX
from tests.cli.fake_fabric import AGENT, ANSWERS, NODES, TURNS
from tests.cli.test_events import frame
from tests.support.pseudo_terminal import TerminalProgram

ROOT = Path(__file__).resolve().parents[2]
TOP = [sys.executable, "-m", "router.cli.main", "top"]
LOADED = {
    **NODES[0],
    "active": 3,
    "waiting": 1,
    "prefill_tokens_per_s": 1234.5,
    "decode_tokens_per_s": 45.25,
    "memory": {"hot_limit_bytes": 4 << 20},
    "usage": {"disk_limit_bytes": 1 << 20},
}
MOVE = {"id": "mira", "move": "m1", "from": "node-a", "to": "node-b", "state": "copying",
        "bytes_sent": 2048, "seconds": 0.5, "at_s": 1789000100.0}  # fmt: skip
USED = {**AGENT, "used_s": 1789000100.0, "busy": False}
SNAPSHOT = {
    "health": {"status": "degraded"},
    "nodes": [LOADED, *NODES[1:]],
    "agents": [USED],
    "agents_left_out": 4,
    "moves": [MOVE],
}
BEGAN = {"at_s": 1789000101.0, "id": "mira", "node": "node-b", "epoch": 4, "cache": "hot",
         "prompt_tokens": 3000, "cached_tokens": 2900}  # fmt: skip
ENDED = {"at_s": 1789000103.0, "id": "mira", "node": "node-b", "outcome": "ok",
         "completion_tokens": 9, "seconds": 2.0,
         "times": {"first_token_s": 0.25, "queue_s": 0.125}}  # fmt: skip


def state_after(*events, snapshot=SNAPSHOT):
    state = FleetState()
    for name, data in (("snapshot", json.loads(json.dumps(snapshot))), *events):
        state.take(ServerEvent(name, None, data))
    return state


def figures_of(state, agents=20):
    return figures(state, "http://127.0.0.1:8000", 1789000110.0, agents)


def lines_of(state, columns=80, rows=None, *, is_utf8=True):
    lines = screen_lines(figures_of(state), columns, rows, is_utf8=is_utf8)
    return [line.text for line in lines]


# Events -> path in the figures, and the value there.
CHANGES = {
    "a turn begins": ([("turn.began", BEGAN)], ("agents", 0, "busy"), True),
    "it begins elsewhere": ([("turn.began", BEGAN)], ("agents", 0, "node"), "node-b"),
    "a turn ends": (
        [("turn.began", BEGAN), ("turn.ended", ENDED)],
        ("agents", 0, "last_turn", "times", "queue_s"),
        0.125,
    ),
    "it was hot": (
        [("turn.began", BEGAN), ("turn.ended", ENDED)],
        ("agents", 0, "last_turn", "cached_tokens"),
        2900,
    ),
    "it has an id": (
        [("turn.began", BEGAN | {"turn": "req_1"}), ("turn.ended", ENDED | {"turn": "req_1"})],
        ("agents", 0, "last_turn", "id"),
        "req_1",
    ),
    "the first token of a node": (
        [("turn.ended", ENDED), ("turn.ended", ENDED | {"times": {"first_token_s": 0.75}})],
        ("nodes", 1, "first_token_s"),
        0.5,
    ),
    "a new agent": (
        [("agent.created", {"id": "ivan", "node": "node-a", "at_s": 1789000105.0})],
        ("agents", 0, "id"),
        "ivan",
    ),
    "a moved agent": ([("agent.moved", MOVE)], ("agents", 0, "node"), "node-b"),
    "an erased agent": ([("agent.erased", {"id": "mira"})], ("agents",), []),
    "a move goes on": (
        [("move.state", MOVE | {"bytes_sent": 4096})],
        ("moves", 0, "bytes_sent"),
        4096,
    ),
    "a move ends": ([("move.state", MOVE | {"state": "committed"})], ("moves",), []),
    "a node is lost": (
        [("node.state", {"node": "node-a", "state": "expired"})],
        ("nodes", 0, "state"),
        "expired",
    ),
    "memory is short": (
        [("node.memory", {"node": "node-a", "hot_limit_bytes": 77})],
        ("nodes", 0, "ram_limit_bytes"),
        77,
    ),
    "a new snapshot": (
        [("snapshot", {"health": {"status": "ok"}, "nodes": [], "agents": [], "moves": []})],
        ("agents_in_all",),
        0,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_event_changes_the_figures(name):
    events, path, expected = CHANGES[name]
    value = figures_of(state_after(*events))
    for part in path:
        value = value[part]

    assert value == expected


def test_history_is_the_last_turn_until_an_event_brings_another():
    state = state_after()
    state.take_turn((None, "mira"), TURNS[0])
    before = figures_of(state)
    state.take(ServerEvent("turn.began", None, BEGAN))
    state.take_turn((None, "mira"), TURNS[0])

    assert before["agents"][0]["last_turn"]["id"] == "req_2b1e5f0c"
    assert before["agents"][0]["last_turn"]["times"]["load_s"] == 0.125
    assert before["nodes"][1]["first_token_s"] == 0.885
    assert figures_of(state)["agents"][0]["last_turn"]["prompt_tokens"] == 3000


def test_displayed_state_is_bounded():
    state = state_after()
    for number in range(3 * TOP_AGENTS_MAX // 2):
        created = {"id": f"agent-{number}", "node": "node-a", "at_s": 1789000200.0 + number}
        state.take(ServerEvent("agent.created", None, created))
        state.take(ServerEvent("move.state", None, MOVE | {"move": f"m{number}"}))

    assert len(state.agents) == TOP_AGENTS_MAX
    assert state.agents_left_out == 4 + 1 + TOP_AGENTS_MAX // 2
    assert len(state.moves) == TOP_MOVES_MAX
    assert len(state.events) == TOP_EVENTS_MAX
    assert state.last_used(1) == [(None, f"agent-{3 * TOP_AGENTS_MAX // 2 - 1}")]
    assert len(state.stale) <= TOP_AGENTS_MAX


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_fit_the_columns(columns):
    names = [f"node-{number}" for number in range(3)]
    state = state_after(snapshot=SNAPSHOT | {"nodes": [LOADED | {"name": name} for name in names]})
    state.take_turn((None, "mira"), TURNS[0])
    lines = lines_of(state, columns)

    assert max(map(len, lines)) <= columns
    assert re.search(r"degraded: 3 of 3 nodes ready, 5 agents, 1 moves  [0-9:]{8}$", lines[0])
    assert lines[0].startswith("http") == (columns >= 80)
    for text in ("node-2", "ready", " 25%", "mira", "2,048"):
        assert any(text in line for line in lines), text
    if columns == 120:
        assert any("1.0 MiB of 4.0 MiB" in line for line in lines)
    if columns >= 80:
        for text in ("885 ms", "45.2", "1,234", "2,040/2,060"):
            assert any(text in line for line in lines), text


@pytest.mark.parametrize("rows", [8, 12, 24, 60])
def test_large_fleet_fits_the_rows(rows):
    snapshot = SNAPSHOT | {
        "nodes": [LOADED | {"name": f"node-{number}"} for number in range(50)],
        "agents": [USED | {"id": f"agent-{number}"} for number in range(200)],
        "moves": [MOVE | {"move": f"m{number}"} for number in range(20)],
    }
    state = state_after(*[("turn.ended", ENDED)] * 30, snapshot=snapshot)
    lines = lines_of(state, 80, rows)

    assert len(lines) <= rows
    assert any("more nodes" in line for line in lines)
    if rows >= 24:
        assert sum("turn.ended" in line for line in lines) >= 2
        assert sum(line.startswith("agent-") for line in lines) >= 2


def test_problems_of_nodes_are_shown():
    lines = lines_of(state_after())

    assert any(line == "node-b: no space left" for line in lines)
    assert any(line.startswith("node-c") and "expired" in line for line in lines)
    assert "degraded: 1 of 3 nodes ready, 5 agents, 1 moves" in lines[0]


def test_bars_need_no_utf8():
    assert any("##......  25%" in line for line in lines_of(state_after(), is_utf8=False))
    assert any("██░░░░░░  25%" in line for line in lines_of(state_after()))


def test_agents_of_other_tenants_are_named_with_them():
    agents = [USED | {"tenant": tenant} for tenant in ("default", "one")]
    lines = lines_of(state_after(snapshot=SNAPSHOT | {"agents": agents}))

    assert any(line.startswith("one/mira ") for line in lines)
    assert any(line.startswith("mira ") for line in lines)


@pytest.fixture
def live(fabric, monkeypatch):
    """Return a fabric with an event stream, to which tests add events."""
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/nodes"), {"data": SNAPSHOT["nodes"]})
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/agents/mira/turns?limit=1"), {"data": TURNS})
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/agents/mira"), USED | {"tokens": 4096})
    fabric.streams["/v1/events"] = [frame("snapshot", SNAPSHOT)]
    return fabric


def test_pipe_gets_one_snapshot(run, live):
    status, out, err = run("top", "--url", live.url)

    assert (status, err) == (0, "")
    assert "\x1b" not in out
    for text in ("node-a  ready", "mira", "2,040/2,060", "885 ms", "copying", "2.0 KiB"):
        assert text in out
    assert run("top", "--once", "--url", live.url)[1].splitlines()[1:] == out.splitlines()[1:]


def test_once_option_prints_one_object(run, live):
    status, out, _ = run("top", "--once", "--json", "--url", live.url)
    (line,) = out.splitlines()
    printed = json.loads(line)

    assert status == 0
    assert printed["url"] == live.url
    assert printed["nodes"][0]["decode_tokens_per_s"] == 45.25
    assert printed["agents"][0]["last_turn"]["times"]["load_s"] == 0.125


def test_json_prints_an_object_per_interval_until_ctrl_c(live):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # for the child
    top = subprocess.Popen(
        [*TOP, "--json", "--interval", "0.5", "--url", live.url], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    with top:
        assert json.loads(top.stdout.readline())["agents"][0]["tokens"] == 2048
        while json.loads(top.stdout.readline())["agents"][0]["tokens"] != 4096:
            pass  # read again by a poll
        top.send_signal(signal.SIGINT)
        _, err = top.communicate(timeout=60)

    assert (top.returncode, err) == (0, "")


@pytest.mark.parametrize("interval", ["0", "0.1", "nan", "1e9"])
def test_invalid_interval_is_misuse(run, live, interval):
    status, out, err = run("top", "--interval", interval, "--url", live.url)

    assert (status, out) == (2, "")
    assert "--interval must be 0.5 to 3600 seconds" in err


def test_missing_fabric_is_a_one_line_error(run):
    status, out, err = run("top", "--url", "http://127.0.0.1:1")

    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "macfabric up" in err


@pytest.fixture
def screen(request, live, tmp_path):
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm-256color",
        "MACFABRIC_URL": live.url, "HOME": str(tmp_path), **getattr(request, "param", {}),
    }  # fmt: skip
    argv = [*TOP, "--interval", "0.5"]
    with contextlib.closing(TerminalProgram(argv, environment, tmp_path)) as program:
        assert program.sees(["node-a", "mira"]), program.raw
        yield program


def assert_left_clean(screen, status):
    assert screen.wait() == status, screen.raw
    assert "Traceback" not in screen.raw
    assert screen.raw.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in screen.raw
    assert screen.mode == screen.mode_before


@pytest.mark.parametrize(
    "screen", [{}, {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, {"NO_COLOR": "1"}],
    ids=["utf-8", "ascii", "no color"], indirect=True,
)  # fmt: skip
def test_screen_follows_events_until_q(screen, live):
    assert screen.sees(["2,040/2,060"])
    live.streams["/v1/events"] += [frame("turn.began", BEGAN), frame("turn.ended", ENDED)]
    assert screen.sees(["turn.ended", "2,900/3,000", "250 ms"]), screen.raw
    assert screen.sees(["4,096"]), "the agent's size is read again"
    screen.type("q")

    assert_left_clean(screen, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_terminal_as_it_was(screen, number):
    screen.process.send_signal(number)

    assert_left_clean(screen, 0)


def test_lost_router_is_shown_and_followed_again(screen, live):
    before = live.streams["/v1/events"]
    live.streams["/v1/events"] = [frame("snapshot", SNAPSHOT | {"agents_left_out": 76})]
    before.append(b"")

    assert screen.sees(["the router has stopped"]), screen.raw
    assert screen.sees(["77 agents"]), screen.raw
    screen.type("q")
    assert_left_clean(screen, 0)


@pytest.mark.parametrize("screen", [{"TERM": "dumb"}], indirect=True)
def test_dumb_terminal_gets_one_snapshot(screen):
    assert screen.wait() == 0
    assert "\x1b" not in screen.raw
