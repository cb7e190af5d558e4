"""`macfabric events`: a stream as text or JSON lines, and its end."""

import json
from urllib.parse import parse_qsl, urlsplit

import pytest

from router.cli import events
from tests.cli.fake_fabric import ANSWERS

SNAPSHOT = {
    "health": {"status": "ok"},
    "nodes": [{"name": "node-a", "state": "ready"}, {"name": "node-b", "state": "suspect"}],
    "moves": [],
    "agents": [{"id": "mira"}],
    "agents_left_out": 2,
}
MOVED = {"at_s": 1.5, "tenant": "default", "id": "mira", "from": "node-a", "to": "node-b"}
STATE = {"at_s": 2.5, "node": "node-b", "state": "ready", "before": None}
SENT = {"at_s": 3.5, "id": "mira", "state": "copying", "bytes_sent": 2048, "seconds": 0.25}


def frame(name, data, number="x1"):
    return f"event: {name}\nid: {number}\ndata: {json.dumps(data)}\n\n".encode()


@pytest.fixture
def stream(fabric):
    fabric.media_type = "text/event-stream"
    fabric.page = b"".join(
        [
            frame("snapshot", SNAPSHOT),
            b": nothing new\n\n",
            frame("agent.moved", MOVED, "x2"),
            frame("node.state", STATE),
            frame("move.state", SENT),
        ]
    )
    return fabric


def test_text_output_is_one_line_per_event(run, stream):
    status, out, err = run("events", "--url", stream.url)
    lines = out.splitlines()

    assert len(lines) == 4
    assert "ok: 1 of 2 nodes ready, 3 agents, 0 moves" in lines[0]
    assert "agent.moved" in lines[1]
    assert "mira of default  from node-a, to node-b" in lines[1]
    assert "node-b  state ready" in lines[2]
    assert "bytes_sent 2.0 KiB, seconds 250 ms" in lines[3]
    assert (status, err) == (1, f"macfabric: the router at {stream.url} has stopped\n")


def test_json_output_is_one_object_per_line(run, stream):
    _, out, _ = run("events", "--json", "--url", stream.url)
    rows = [json.loads(line) for line in out.splitlines()]

    assert rows[0] == {"event": "snapshot", "id": "x1", "data": SNAPSHOT}
    assert rows[1] == {"event": "agent.moved", "id": "x2", "data": MOVED}


def test_ctrl_c_exits_with_0(run, stream, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(events, "event_line", interrupted)
    assert run("events", "--url", stream.url) == (0, "", "")


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"event: x\ndata: {\n\n", "broke off"),
        (b"event: x\ndata: \xff\n\n", "broke off"),
        (b"event: x\ndata: {}", "has stopped"),
    ],
)
def test_broken_stream_is_reported(run, stream, page, why):
    stream.page = page
    status, out, err = run("events", "--url", stream.url)
    assert (status, out) == (1, "")
    assert why in err


def test_missing_event_stream_is_reported(run, fabric):
    status, _, err = run("events", "--url", fabric.url)
    assert status == 1
    assert "sends no events" in err


def test_refused_key_is_reported(run, fabric):
    fabric.key = "secret"
    status, _, err = run("events", "--url", fabric.url)
    assert status == 1
    assert "refuses the key" in err


def test_help_mentions_ctrl_c(run):
    status, out, _ = run("events", "--help")
    assert status == 0
    assert "Ctrl-C" in out


def test_filters_are_part_of_the_request(run, stream):
    run("events", "--agent", "mira", "--node", "node-a", "--limit", "1", "--url", stream.url)
    [(_, path, _)] = stream.requests
    assert dict(parse_qsl(urlsplit(path).query)) == {
        "agent": "mira",
        "node": "node-a",
        "limit": "1",
    }


def test_past_events_end_the_command_without_complaint(run, stream, monkeypatch):
    path = "/v1/events?name=agent&follow=false"
    monkeypatch.setitem(ANSWERS, ("GET", path), {"object": "none"})
    status, out, err = run("events", "--past", "--name", "agent", "--url", stream.url)

    assert (status, err) == (0, "")
    assert "agent.moved" in out
    assert stream.requests[-1][:2] == ("GET", path)
