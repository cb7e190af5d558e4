"""Output of commands that query a running fabric, as text and as JSON, and their errors."""

import io
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from router.cli import move_progress, queries
from router.cli.data_folder import DataFolder
from router.client.client import Fabric
from router.private_files import write_private
from router.supervise.processes import identify
from tests.cli.fake_fabric import (
    AGENT,
    ANSWERS,
    DRAINED,
    FORKED,
    MOVED,
    NODES,
    PINNED,
    PREFETCHED,
    RECEIPT,
    REPLICA,
    STATUSES,
    STUCK,
    TURNS,
    USAGE,
)
from tests.cli.test_events import frame

# Command line -> text that the output must contain, and the JSON output.
COMMANDS = {
    "nodes": (
        ["nodes"],
        ["node-a", "ready", "1.0 MiB/2.0 GiB", "512.0 KiB/5.0 GiB", "stuck", "expired"],
        NODES,
    ),
    "nodes --wide": (
        ["nodes", "--wide"],
        ["1.0 MiB/2.0 GiB", "1,200", "warning", "0.1.0", "killed 2"],
        NODES,
    ),
    "agents": (["agents"], ["mira", "2,040/2,060", "the stored text ends there"], None),
    "why": (
        ["agents", "--why", "mira"],
        ["req_2b1e5f0c", "node-b", "disk", "2,040/2,060", "885 ms", "been evicted from"],
        TURNS,
    ),
    "why of a tenant": (["agents", "--why", "mira", "--tenant", "one"], ["req_2b1e5f0c"], TURNS),
    "agent": (["agent", "mira"], ["owner", "node-a", "hot 1.0 MiB"], AGENT),
    "migrate": (
        ["migrate", "mira", "--to", "node-b"],
        ["8 sent, 1 there", "512.0 KiB", "120 ms in all, 20 ms of it paused"],
        MOVED,
    ),
    "fork": (["fork", "mira", "--as", "ivan"], ["ivan", "2,048", "3 sent, 5 there"], FORKED),
    "replicate": (["replicate", "mira", "--to", "node-b"], ["after each turn", "2.0 KiB"], REPLICA),
    "prefetch": (["prefetch", "mira"], ["hot, disk", "1.0 MiB"], PREFETCHED),
    "drain": (
        ["drain", "node-a", "--no-wait"],
        ["drained", "7 agents, 512.0 KiB", "node-a has no agents left: you can close its lid"],
        DRAINED,
    ),
    "undrain": (["undrain", "node-a"], ["node-a", "ready"], {"node": "node-a", "state": "ready"}),
    "pin": (["pin", "mira"], ["node-a", "pinned"], PINNED),
    "erase": (["erase", "mira"], ["8 blocks, 512.0 KiB", "node-a  removed", "3"], RECEIPT),
    "usage": (
        ["usage", "--period", "hour"],
        ["2026-01-02 03:00", "one", "12,000", "9,000", "3,000", "12 min 34 s", "turns", "8"],
        USAGE,
    ),
    "usage of a tenant": (
        ["usage", "--tenant", "one", "--limit", "1"],
        ["2026-01-02 03:00"],
        USAGE,
    ),
    "status": (["status"], ["3, 1 ready", "degraded", "no space left", "3 of 9"], None),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_query_prints_text(run, fabric, name):
    argv, expected, _ = COMMANDS[name]
    status, out, err = run(*argv, "--url", fabric.url)

    assert (status, err) == (0, "")
    assert [text for text in expected if text not in out] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_query_prints_json(run, fabric, name):
    argv, _, expected = COMMANDS[name]
    status, out, err = run(*argv, "--url", fabric.url, "--json")
    printed = json.loads(out)

    assert (status, err) == (0, "")
    assert expected is None or printed == expected


def test_columns_are_aligned_in_a_pipe(run, fabric):
    lines = run("agents", "--url", fabric.url)[1].splitlines()
    at = lines[0].index("tokens")

    assert lines[1][at:].startswith("2,048")
    assert lines[2][at:].startswith("-")


def test_status_json_has_counts(run, fabric):
    printed = json.loads(run("status", "--url", fabric.url, "--json")[1])

    assert printed["agents"] == 3, "of all tenants, as the nodes' tokens are"
    assert printed["nodes"] == NODES
    assert printed["url"] == fabric.url


def test_status_counts_a_tenants_own_agents(run, fabric, monkeypatch):
    rows = [{"name": "node-a", "state": "ready", "agents": 2, "tokens": 2048}]
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/nodes"), {"object": "list", "data": rows})

    assert json.loads(run("status", "--url", fabric.url, "--json")[1])["agents"] == 2


def test_status_lists_every_listening_address(run, fabric, monkeypatch):
    urls = ["http://127.0.0.1:8000", "http://[::1]:8000"]
    monkeypatch.setitem(ANSWERS, ("GET", "/healthz"), {"status": "ok", "urls": urls})
    _, printed, _ = run("status", "--url", fabric.url)

    assert ", ".join(urls) in printed


def test_status_shows_why_a_node_failed_and_its_next_start(run, fabric, monkeypatch):
    failed = {"state": "failed", "failure": "FatalError: no model", "starts_again_in_s": 12.4}
    monkeypatch.setitem(ANSWERS, ("GET", "/healthz"), {"status": "unavailable", "nodes": []})
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/nodes"), {"data": [{"name": "node-c", **failed}]})
    monkeypatch.setitem(STATUSES, ("GET", "/healthz"), 503)
    status, printed, _ = run("status", "--url", fabric.url)

    assert status == 1
    assert "unavailable" in printed
    failure = "node-c failed: FatalError: no model; next start in 12 s"
    assert f"warning: {failure}" in printed


NOW_S = 1.9e9


def nodes(monkeypatch, *rows, **health):
    monkeypatch.setattr(queries, "time", SimpleNamespace(time=lambda: NOW_S))
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/nodes"), {"data": list(rows)})
    monkeypatch.setitem(ANSWERS, ("GET", "/healthz"), {"status": "degraded", **health})


@pytest.mark.parametrize(
    ("row", "warning"),
    [
        ({"state": "suspect"}, "has not answered for 2 s"),
        ({"state": "expired"}, "does not answer; its agents are served by other nodes"),
        ({"state": "asleep"}, "sleeps"),
        ({"state": "draining", "drain": DRAINED}, "is drained: you can close its lid"),
        ({"state": "draining", "drain": STUCK}, "cannot be drained"),
        ({"memory": {"pressure": "critical"}}, "memory pressure (critical)"),
        ({"thermal_state": "serious"}, "its Mac is hot (serious)"),
        ({"certificate_ends_s": NOW_S + 2.5 * 86_400}, "a certificate that ends in 2 days"),
        ({"template_warning": "its calls are text"}, "its calls are text"),
        (
            {"last_exit": {"at_s": NOW_S - 61, "cause": "killed", "detail": "by a signal"}},
            "was restarted; its previous process, last seen 1 min 1 s ago: by a signal",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_status_names_the_node_and_its_problem(run, fabric, monkeypatch, row, warning):
    nodes(monkeypatch, {"name": "node-x", "state": "ready", **row})
    (line,) = [
        line for line in run("status", "--url", fabric.url)[1].splitlines() if "warn" in line
    ]

    assert line.startswith("warning: node-x ")
    assert warning in line


def test_status_of_a_sound_fabric_has_no_warning(run, fabric, monkeypatch):
    stopped = {"at_s": NOW_S - 5, "cause": "stopped", "detail": "stopped on request"}
    old = {"at_s": NOW_S - 7200, "cause": "killed", "detail": "by a signal"}
    row = {"state": "ready", "memory": {"pressure": "normal"}, "thermal_state": "nominal"}
    nodes(monkeypatch, {"name": "a", "last_exit": stopped, **row}, {"name": "b", "last_exit": old})

    assert "warning" not in run("status", "--url", fabric.url)[1]


def test_status_names_nodes_that_have_not_joined(run, fabric, monkeypatch):
    nodes(monkeypatch, {"name": "node-a", "state": "ready"}, missing=["node-z"], unmet=2)
    printed = run("status", "--url", fabric.url)[1]

    assert "warning: node-z has not joined yet" in printed
    assert "warning: 2 expected nodes have not joined yet" in printed


def test_status_shows_what_reuse_saved_today(run, fabric, monkeypatch):
    day = {"start_s": NOW_S - 60, "prompt_tokens": 10_000, "saved_s": 62.0}
    rows = [{**day, "cached_tokens": 9_000}, {**day, "start_s": 0, "cached_tokens": 70}]
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/usage?period=day"), {"data": rows})
    nodes(monkeypatch)
    printed = run("status", "--url", fabric.url)[1]

    assert "1 min 2 s of computing: 9,000 of 10,000 prompt tokens were reused" in printed


def test_nodes_are_listed_by_the_end_of_their_drain(run, fabric, monkeypatch):
    nodes(monkeypatch, {"name": "b", "state": "draining", "drain": DRAINED}, {"name": "a"})
    listed = json.loads(run("nodes", "--state", "drained", "--json", "--url", fabric.url)[1])

    assert [row["name"] for row in listed] == ["b"]


@pytest.mark.parametrize(("order", "first"), [("tokens", "big"), ("used", "late"), ("disk", "big")])
def test_agents_are_sorted(run, fabric, monkeypatch, order, first):
    rows = [
        {"id": "small", "tokens": 5, "used_s": 2.0},
        {"id": "big", "tokens": 9, "used_s": 1.0, "bytes": {"hot": 0, "disk": 7}},
        {"id": "late", "used_s": 3.0},
    ]
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/agents"), {"data": rows})
    printed = run("agents", "--sort", order, "--limit", "2", "--json", "--url", fabric.url)[1]

    assert len(json.loads(printed)) == 2
    assert json.loads(printed)[0]["id"] == first


def test_pin_sends_its_state_and_warns_when_without_effect(run, fabric):
    run("pin", "mira", "--off", "--url", fabric.url)
    status, out, _ = run("pin", "ivan", "--url", fabric.url)

    requests = [(method, path, body) for method, path, body in fabric.requests]
    assert requests == [
        ("POST", "/v1/agents/mira/pin", {"pinned": False}),
        ("POST", "/v1/agents/ivan/pin", {"pinned": True}),
    ]
    assert status == 0
    assert "without effect" in out


def test_drain_waits_until_its_end_and_lists_stuck_agents(run, fabric):
    status, out, err = run("drain", "node-b", "--url", fabric.url)
    printed = json.loads(run("drain", "node-b", "--json", "--url", fabric.url)[1])

    assert status == 1
    assert "the disk is full" in out
    assert "7 moved, 3 left" in err
    assert "2 more" in err
    assert printed == STUCK


def test_drain_ended_by_undrain_fails(run, fabric):
    status, _, err = run("drain", "node-c", "--url", fabric.url)

    assert status == 1
    assert "was ended by `undrain`" in err


def test_fork_and_replicate_send_their_options(run, fabric):
    run("fork", "mira", "--as", "ivan", "--to", "node-b", "--url", fabric.url)
    run("replicate", "mira", "--to", "node-b", "--once", "--url", fabric.url)

    assert [(path, body) for _, path, body in fabric.requests] == [
        ("/v1/agents/mira/fork", {"as": "ivan", "to": "node-b"}),
        ("/v1/agents/mira/replicate", {"to": "node-b", "keep": False}),
    ]


def test_erasure_pending_on_a_node_exits_with_1(run, fabric):
    status, out, _ = run("erase", "ivan", "--url", fabric.url)

    assert status == 1
    assert "node-b is unreachable" in out


def test_erasure_reports_borrowed_tokens_and_quoting_runs(run, fabric):
    _, out, _ = run("erase", "ivan", "--url", fabric.url)

    assert "640 tokens of 2 other agents dropped" in out
    assert "run debate-1 still quotes it" in out


def test_erase_with_runs_removes_quoting_runs(run, fabric):
    _, out, _ = run("erase", "ivan", "--runs", "--url", fabric.url)

    assert fabric.requests == [("DELETE", "/v1/agents/ivan?runs=true", None)]
    assert "run debate-1, which quoted it, is removed" in out


def test_migrate_sends_its_target(run, fabric):
    run("migrate", "mira", "--to", "node-b", "--url", fabric.url)

    assert fabric.requests == [("POST", "/v1/agents/mira/migrate", {"to": "node-b"})]


def test_migrate_reports_its_progress_on_a_terminal(fabric, monkeypatch):
    frames = fabric.streams["/v1/events?agent=mira&name=move.state&snapshot=false"] = []
    agent = Fabric(fabric.url).agent("mira")
    monkeypatch.setattr(move_progress, "REPORT_S", 0.0)
    monkeypatch.setattr(move_progress, "errors_are_terminal", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    deadline_s = time.monotonic() + 50
    with move_progress.move_progress(agent, quiet=False):
        data = {"id": "mira", "state": "copying", "bytes_sent": 4096, "bytes_total": 8192}
        frames.append(frame("move.state", data))
        while not shown.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.02)

    assert "copying, 4.0 KiB of 8.0 KiB sent" in shown.getvalue()


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_needs_a_terminal_and_no_json(fabric, monkeypatch, quiet):
    monkeypatch.setattr(move_progress, "errors_are_terminal", lambda: quiet)
    with move_progress.move_progress(Fabric(fabric.url).agent("mira"), quiet=quiet):
        pass

    assert fabric.requests == []


def test_names_are_quoted_in_paths(run, fabric):
    status, _, err = run("agent", "a/../b", "--url", fabric.url)

    assert fabric.requests[0][1] == "/v1/agents/a%2F..%2Fb"
    assert status == 1
    assert "no agent is called that" in err


def test_endpoint_is_read_from_environment(run, fabric, monkeypatch):
    monkeypatch.setenv("MACFABRIC_URL", fabric.url + "/")

    assert run("nodes")[0] == 0


def test_endpoint_is_read_from_data_folder(run, fabric, tmp_path):
    folder = DataFolder(tmp_path)
    write_private(folder.endpoint, json.dumps({"url": fabric.url}))

    assert run("nodes", "--data", str(tmp_path))[0] == 0


def test_missing_fabric_error_mentions_macfabric_up(run, tmp_path):
    status, out, err = run("agents", "--data", str(tmp_path))

    assert (status, out) == (1, "")
    assert f"No fabric is running in {tmp_path}" in err
    assert "macfabric up" in err


def test_refused_connection_error_mentions_macfabric_up(run):
    status, _, err = run("status", "--url", "http://127.0.0.1:1")

    assert status == 1
    assert "Connection refused" in err
    assert "macfabric up" in err


@pytest.mark.parametrize("url", ["localhost", "ftp://x", "http://:80", "http://x:port"])
def test_invalid_url_is_misuse(run, url):
    status, _, err = run("nodes", "--url", url)

    assert status == 2
    assert "http://127.0.0.1:8000" in err


def test_api_key_is_sent(run, fabric, monkeypatch):
    fabric.key = "0123456789abcdef"
    refused = run("nodes", "--url", fabric.url)
    monkeypatch.setenv("MACFABRIC_API_KEY", fabric.key)

    assert refused[0] == 1
    assert "the key is unknown" in refused[2]
    assert "MACFABRIC_API_KEY" in refused[2]
    assert run("nodes", "--url", fabric.url)[0] == 0


@pytest.mark.parametrize("page", [b"<html>", b"", b"[]", b'{"data": 3}'])
def test_other_server_is_recognized(run, fabric, page):
    fabric.page = page
    status, _, err = run("nodes", "--url", fabric.url)

    assert status == 1
    assert "fabric" in err


def test_operator_key_of_data_folder_is_sent_to_its_own_fabric(run, fabric, tmp_path, monkeypatch):
    folder = DataFolder(tmp_path / "data")
    folder.create()
    key = folder.renew_operator_key()
    folder.endpoint.write_text(json.dumps({"url": fabric.url}))
    clients = []
    monkeypatch.setattr(Fabric, "_headers", lambda self, more: clients.append(self) or dict(more))

    run("nodes")
    run("nodes", "--url", fabric.url)
    run("nodes", "--url", fabric.url.replace("127.0.0.1", "localhost"))
    monkeypatch.setenv("MACFABRIC_OPERATOR_KEY", "from-the-environment")
    run("nodes", "--key", "given")
    folder.operator_key.chmod(0o644)
    monkeypatch.delenv("MACFABRIC_OPERATOR_KEY")
    run("nodes")

    assert folder.operator_key.stat().st_mode & 0o777 == 0o644
    assert [(e.key, e.operator_key) for e in clients] == [
        (None, key),
        (None, key),
        (None, None),
        ("given", "from-the-environment"),
        (None, None),
    ], "readable by others: not used"
    folder.forget_run()
    assert not folder.operator_key.exists()


def test_new_operator_key_is_private(tmp_path):
    folder = DataFolder(tmp_path / "data")
    folder.create()
    first, second = folder.renew_operator_key(), folder.renew_operator_key()

    assert first != second == folder.read_operator_key()
    assert folder.operator_key.stat().st_mode & 0o777 == 0o600


def test_starting_fabric_is_distinguished_from_none(run, tmp_path):
    folder = DataFolder(tmp_path / "data")
    folder.create()
    assert "No fabric is running" in run("status")[2]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as starter:
        folder.write_run(identify(starter.pid), {}, None)
        assert f"is starting (process {starter.pid}); try again" in run("status")[2]
        starter.stdin.close()
    assert "No fabric is running" in run("status")[2]
