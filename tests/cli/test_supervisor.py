"""The supervisor's reaction to the end of a process."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from router.cli.data_folder import DataFolder
from router.cli.errors import CommandError
from router.cli.supervisor import (
    NODES,
    RESTART_WINDOW_S,
    ROUTER,
    START_TRIES,
    Plan,
    Supervisor,
)

PORT = 4711
TRACEBACK = """said before it
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    start()
  File "y.py", line 2, in start
    raise ValueError("the reason")
ValueError: the reason
"""


class FakeKeeper:
    """A keeper with prepared events, which records what is started."""

    def __init__(self):
        self.events, self.started, self.children = [], [], {}

    def start(self, name, argv, env, log, *, piped=False):
        self.started.append((name, argv))

    def next_event(self, timeout_s):
        return self.events.pop(0) if self.events else None


class FakeRay:
    """A cluster of one Ray node that starts once `runs` is set."""

    def __init__(self):
        self.started, self.runs, self.short_dir, self.reason = [], False, None, ""
        self.nodes = (SimpleNamespace(process="ray-node-a"),)

    def find(self, process):
        return next((node for node in self.nodes if node.process == process), None)

    def start_node(self, node):
        self.started.append(node.process)

    def has_started(self, node):
        return self.runs

    def end_reason(self, node):
        return self.reason


@pytest.fixture
def supervisor(tmp_path):
    plan = Plan(
        DataFolder(tmp_path),
        config=None,
        ray_address="127.0.0.1:1",
        environment={},
        host="127.0.0.1",
        port=0,
        nodes_expected=0,
        at_exit="flush",
        start_timeout_s=1.0,
    )
    instance = Supervisor(plan, FakeKeeper(), None, lambda _: None, lambda: False)
    instance.url, instance.phases["ready"] = f"http://127.0.0.1:{PORT}", 0.0
    return instance


def exited_event(name, status=-9):
    return {"event": "exited", "name": name, "status": status, "why": ""}


@pytest.mark.parametrize("name", [ROUTER, NODES])
def test_ended_process_is_restarted_in_the_same_step(supervisor, name):
    supervisor.keeper.events.append(exited_event(name))

    supervisor._step()

    assert [started for started, _ in supervisor.keeper.started] == [name]


def test_restarted_router_keeps_its_port(supervisor):
    supervisor.keeper.events.append(exited_event(ROUTER))

    supervisor._step()

    _, argv = supervisor.keeper.started[0]
    assert argv[argv.index("--port") + 1] == str(PORT)


def test_repeatedly_ending_process_is_restarted_with_backoff(supervisor, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("router.cli.supervisor.time.monotonic", lambda: now_s[0])
    pauses = []
    for _ in range(12):
        count, ended_s = len(supervisor.keeper.started), now_s[0]
        supervisor.keeper.events.append(exited_event(ROUTER))
        supervisor._step()
        while len(supervisor.keeper.started) == count:
            now_s[0] += 0.5
            supervisor._step()
        pauses.append(now_s[0] - ended_s)

    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert 10.0 <= pauses[-1] <= 30.0
    assert {name for name, _ in supervisor.keeper.started} == {ROUTER}, "no node was restarted"

    now_s[0] += RESTART_WINDOW_S + 1
    supervisor.keeper.events.append(exited_event(ROUTER))
    count = len(supervisor.keeper.started)
    supervisor._step()
    assert len(supervisor.keeper.started) == count + 1, "old failures do not count"


@pytest.mark.parametrize("name", [ROUTER, NODES])
def test_process_that_never_starts_ends_the_fabric_with_its_reason(supervisor, name):
    del supervisor.phases["ready"]
    log = supervisor.plan.folder.log(name)
    log.parent.mkdir()
    log.write_text(TRACEBACK)
    supervisor.keeper.events.append(exited_event(name))

    with pytest.raises(CommandError, match=f"{name} was killed by SIGKILL") as caught:
        supervisor._step()

    assert "ValueError: the reason" in str(caught.value)
    assert "before it" in str(caught.value)
    assert "File" not in str(caught.value), "the reason has no stack trace"
    assert supervisor.keeper.started == []


def test_ray_start_is_retried(supervisor):
    del supervisor.phases["ready"]
    supervisor.ray = FakeRay()
    supervisor.keeper.events += [
        exited_event("ray-node-a"),
        exited_event(NODES),
        exited_event("ray-node-a"),
    ]
    for _ in range(3):
        supervisor._step()

    assert supervisor.ray.started == ["ray-node-a"] * 2
    assert supervisor.keeper.started == [], "nothing is started without Ray's head"
    supervisor.ray.runs = True
    supervisor._step()
    assert [name for name, _ in supervisor.keeper.started] == [NODES]
    supervisor._ended["ray-node-a"] = [time.monotonic()] * (START_TRIES - 1)
    supervisor.keeper.events.append(exited_event("ray-node-a"))
    with pytest.raises(CommandError, match="ray-node-a was killed"):
        supervisor._step()


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        (ROUTER, 1, "router ended with status 1 (ValueError: the reason); starting it again"),
        (ROUTER, -9, "router was killed by SIGKILL; starting it again"),
        ("ray-node-a", 1, "ray-node-a ended with status 1 (its agents are late); starting"),
        ("ray-node-a", -9, "ray-node-a was killed by SIGKILL (its agents are late); starting"),
    ],
)
def test_line_of_a_restart_has_the_reason(supervisor, name, status, line):
    lines = []
    supervisor.say, supervisor.ray = lines.append, FakeRay()
    supervisor.ray.reason = "its agents are late"
    log = supervisor.plan.folder.log(name)
    log.parent.mkdir()
    log.write_text(TRACEBACK)
    supervisor.keeper.events.append(exited_event(name, status))
    supervisor._step()
    assert lines[0].startswith(line)


def test_failed_start_names_the_process_that_failed_first(supervisor):
    del supervisor.phases["ready"]
    supervisor.ray = FakeRay()
    for name, text in (("ray-node-a", "the GCS has become overloaded"), (NODES, "no cluster")):
        log = supervisor.plan.folder.log(name)
        log.parent.mkdir(exist_ok=True)
        log.write_text(text)
    supervisor.keeper.events.append(exited_event("ray-node-a"))
    supervisor._step()
    supervisor.plan.folder.log("ray-node-a").unlink()  # as the next attempt does
    supervisor._ended[NODES] = [time.monotonic()] * START_TRIES  # no attempts left
    supervisor.keeper.events.append(exited_event(NODES))

    with pytest.raises(CommandError, match="nodes was killed") as caught:
        supervisor._step()

    assert "first failure of this start: ray-node-a was killed by SIGKILL" in str(caught.value)
    assert "GCS has become overloaded" in str(caught.value)


def test_stalled_start_names_the_awaited_process(supervisor):
    supervisor.phases.clear()
    supervisor.url = None
    supervisor.ray = FakeRay()
    assert supervisor._awaited_process() == "ray-node-a", "the router has not been started yet"
    supervisor.ray.runs = True
    assert supervisor._awaited_process() == ROUTER
    supervisor.url = "http://127.0.0.1:1"
    assert supervisor._awaited_process() == NODES


def test_serve_fails_if_ray_was_never_joined(supervisor):
    del supervisor.phases["ready"]
    supervisor.plan = replace(supervisor.plan, waits_indefinitely=True)
    supervisor.keeper.events.append(exited_event(NODES))
    with pytest.raises(CommandError, match="nodes was killed"):
        supervisor._step()

    supervisor._on_line(NODES, '{"event": "connected"}')
    supervisor.keeper.events.append(exited_event(NODES))
    supervisor._step()
    assert [name for name, _ in supervisor.keeper.started] == [NODES]


def test_stop_records_its_progress(supervisor):
    folder = supervisor.plan.folder
    supervisor.stop(hurry=lambda: False)
    assert folder.read_stop_progress() == {"event": "stopping"}
    supervisor._report_drain(json.dumps({"event": "draining", "turns": 3, "left_s": 7.5}))
    assert folder.read_stop_progress() == {"event": "draining", "turns": 3, "left_s": 7.5}
    folder.forget_run()
    assert folder.read_stop_progress() == {}
