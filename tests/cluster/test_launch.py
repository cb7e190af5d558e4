"""Nodes are launched on a real Ray cluster, with a fake service that loads no model."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from router.supervise.keeper import Keeper
from router.supervise.ray_processes import LocalRay
from tests.cluster.conftest import NAMES
from tests.support.keys import make_keys

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TIMEOUT_S = 60.0


class Launching:
    """A `python -m node` process, read event by event."""

    def __init__(self, cluster: tuple[Keeper, LocalRay, Path], name: str, *options: str) -> None:
        self.keeper, ray, folder = cluster
        self.name, self.log = name, folder / f"{name}.log"
        self.data = folder
        argv = [sys.executable, "-m", "node", "--data-dir", str(folder)]
        argv += ["--ray-address", ray.address, "--service-module", "standin_service", *options]
        self.keeper.start(name, argv, ray.environment, self.log, piped=True)

    def next(self) -> dict:
        """Return the next event of the process, or its exit event at the end."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            event = self.keeper.next_event(0.5)
            if event and event.get("name") == self.name:
                if event["event"] == "line":
                    news = json.loads(event["text"])
                    if news["event"] in ("waiting", "connected", "phase"):
                        continue
                    return news
                if event["event"] == "exited":
                    return event
        pytest.fail(f"no event within {TIMEOUT_S} s: {self.log.read_text()}")

    def until(self, kind: str, count: int = 1) -> list[dict]:
        """Return `count` events of one kind."""
        found = []
        while len(found) < count:
            event = self.next()
            assert event["event"] in (kind, "lost"), (event, self.log.read_text())
            if event["event"] == kind:
                found.append(event)
        return found

    def end(self) -> dict:
        """End the process; return its exit event."""
        return next(e for e in self.keeper.end([self.name], 25.0) if e["event"] == "exited")

    def read_notes(self, node: str) -> list[list[str]]:
        """Return the entries written by a node's fake service: event, incarnation, pid."""
        text = (self.data / "nodes" / node / "notes").read_text()
        return [line.split() for line in text.splitlines()]


@pytest.mark.nightly
def test_failed_node_start_is_reported(cluster):
    launching = Launching(cluster, "broken", "--model", "broken:no such model")
    event = launching.next()

    assert event["event"] == "failed"
    assert "no such model" in event["message"]
    assert launching.next()["status"] == 1

    # The detached actors stay and keep the reason; stopping them makes room for the next test.
    cleaning = Launching(cluster, "cleaning", "--watch", "--at-exit", "stop")
    cleaning.until("failed", 3)
    assert cleaning.end()["status"] == 0


@pytest.mark.nightly
def test_nodes_become_ready_restart_and_stop(cluster):
    launching = Launching(
        cluster, "nodes", "--model", "loads:1", "--expect", "3", "--watch", "--at-exit", "stop"
    )
    ready = {event["node"]: event for event in launching.until("ready", 3)}

    assert sorted(ready) == ["node-a", "node-b", "node-c"]
    assert all(event["self_test"]["passed"] for event in ready.values())
    if sys.platform.startswith("linux"):
        assert len({event["host"] for event in ready.values()}) == 3

    victim = ready["node-b"]
    os.kill(victim["pid"], signal.SIGKILL)
    (again,) = launching.until("ready")

    assert again["node"] == "node-b"
    assert again["pid"] != victim["pid"]
    assert again["incarnation"] == victim["incarnation"] + 1

    # A second launch finds the same actors.
    second = Launching(cluster, "second", "--model", "loads:1", "--expect", "3")
    pids = {event["node"]: event["pid"] for event in second.until("ready", 3)}
    assert pids == {name: event["pid"] for name, event in (ready | {"node-b": again}).items()}
    assert second.next()["status"] == 0

    assert launching.end()["status"] == 0
    for name in ready:
        assert [note[0] for note in launching.read_notes(name)][-2:] == ["stop", "stopped"]
    assert [note[0] for note in launching.read_notes("node-b")] == [
        "start",
        "start",
        "stop",
        "stopped",
    ]


@pytest.mark.nightly
def test_failed_start_is_retried_by_the_same_actor(cluster, tmp_path):
    model_path = tmp_path / "mended"
    options = ("--model", f"needs:{model_path}", "--expect", "3", "--watch", "--at-exit", "stop")
    launching = Launching(cluster, "mended", *options)
    waits_s = {"node-a": [], "node-b": [], "node-c": []}
    while min(map(len, waits_s.values())) < 2:
        event = launching.next()
        assert (event["event"], f"{model_path} is not there" in event["message"]) == (
            "failed",
            True,
        )
        waits_s[event["node"]].append(event["retry_s"])
    model_path.touch()
    ready = [launching.next() for _ in range(3)]

    assert all(waits == sorted(set(waits)) for waits in waits_s.values()), waits_s
    assert {event["event"] for event in ready} == {"ready"}, ready
    assert launching.end()["status"] == 0
    for name in waits_s:
        last = launching.read_notes(name)[-3:]
        assert [what for what, *_ in last] == ["start", "stop", "stopped"]
        assert len({pid for *_, pid in last}) == 1


@pytest.mark.nightly
def test_dead_actor_is_recreated_with_growing_delays(cluster):
    launching = Launching(cluster, "dying", "--model", "dies:", "--watch", "--at-exit", "stop")
    waits_s = []
    while len(waits_s) < 2:
        event = launching.next()
        assert event["event"] == "failed"
        assert "its actor is dead" in event["message"]
        if event["node"] == "node-a":
            waits_s.append(event["retry_s"])
    deaths = [note for note in launching.read_notes("node-a") if note[0] == "death"]

    assert waits_s == [5.0, 10.0]
    assert len(deaths) == 4
    assert launching.end()["status"] == 0


@pytest.mark.nightly
def test_nodes_with_changed_settings_are_restarted(cluster):
    """Ray restarts an actor with its first arguments: new settings need a new actor."""
    first = Launching(cluster, "before", "--model", "loads:0", "--expect", "3")
    before = {event["node"]: event for event in first.until("ready", 3)}
    assert first.next()["status"] == 0

    options = ("--model", "loads:0.0", "--expect", "3", "--watch", "--at-exit", "stop")
    second = Launching(cluster, "after", *options)
    after = {event["node"]: event for event in second.until("ready", 3)}
    assert sorted(after) == sorted(before)
    for name, event in after.items():
        assert event["pid"] != before[name]["pid"]
        assert event["incarnation"] == before[name]["incarnation"] + 1
        assert [note[0] for note in second.read_notes(name)][-3:] == ["stop", "stopped", "start"]
    assert second.end()["status"] == 0


@pytest.mark.nightly
def test_too_few_macs_are_reported(cluster):
    launching = Launching(
        cluster, "few", "--model", "loads:0", "--expect", "4", "--timeout", "25", "--watch"
    )
    launching.until("ready", 3)

    assert launching.next()["status"] == 1
    assert "3 of 4 Macs joined Ray within 25 s" in launching.log.read_text()
    assert "--labels=mac=NAME" in launching.log.read_text()


def test_missing_cluster_is_reported(tmp_path):
    keeper = Keeper(tmp_path / "keeper.log")
    make_keys(tmp_path)
    ray = LocalRay(tmp_path, NAMES, keeper)  # never started
    launching = Launching((keeper, ray, tmp_path), "nowhere", "--timeout", "1")
    try:
        assert launching.next()["status"] == 1
    finally:
        keeper.close()
    assert f"no Ray cluster answers at {ray.address}" in launching.log.read_text()
