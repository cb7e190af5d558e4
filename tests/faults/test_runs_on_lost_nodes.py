"""Directives and forks of runs on a killed node: from a replica, or after a turn.

Runs of an HTTP client, and runs inside the router.
"""

import json
import threading
import time

import pytest

from router.scenario.event_rows import read_event
from router.scenario.reader import read_scenario
from router.scenario.run_events import AgentCopied, AgentSpoke, MemoryEdited, PhaseEnded, Waited
from router.scenario.series import SeriesPlan
from tests.support.http_fabric_client import HttpFabricClient
from tests.support.performed import performed
from tests.support.process_fabric import process_fabric
from tests.support.samples import sample

ENDED_S = 120.0
SCENARIO = """
scenario: deadnode
defaults: {max_tokens: 16, temperature: 0}
agents:
  kim: {system: You remember what you are told., place: {node: mac-b}}
  sam: {system: You remember what you are told., place: {node: mac-b}}
  heir: {}
  zed: {place: {node: mac-c}}
phases:
  - id: told
    agents: [kim, sam]
    visible_to: []
    prompts:
      kim: The code of the lamp room is otter lantern quartz.
      sam: The code of the coal room is violin saddle copper.
    ask: {kim: Say it. The code of the lamp room is, sam: Say it. The code of the coal room is}
  - {id: pause, agents: [zed], rounds: 10, ask: {zed: Wait.}}
  - id: later
    agents: [kim, sam]
    visible_to: []
    directives: [{agent: kim, forget: told}, {agent: sam, forget: told}]
    ask: {kim: Try. The code of the lamp room is, sam: Try. The code of the coal room is}
    expect:
      - {agent: kim, never_says: otter lantern}
      - {agent: sam, never_says: violin saddle}
  - id: copy
    agents: [heir]
    fork: {from: kim, as: [heir]}
    ask: {heir: Try. The code of the lamp room is}
    expect: [{agent: heir, never_says: otter lantern}]
"""


def kill_mac_b(fabric):
    """Leave `kim` a copy on mac-a, and `sam` none; kill the node of both agents."""
    for agent in ("kim", "sam"):
        path = f"/v1/agents/scn.deadnode.{agent}"
        shown = fabric.http.get(path).json()
        assert shown["owner"] == "mac-b", shown
        for node in shown["replicas"]:
            evicted = fabric.http.post(f"{path}/evict", json={"from": "disk", "node": node})
            assert evicted.status_code == 200, evicted.text
    copy = fabric.http.post(
        "/v1/agents/scn.deadnode.kim/replicate", json={"to": "mac-a", "keep": False}
    )
    assert copy.status_code == 200, copy.text
    fabric.kill("mac-b")


def run_over_http(fabric, folder, on_event):
    scenario = read_scenario(SCENARIO.encode(), "deadnode.yaml")
    plan = SeriesPlan(scenario, "dn", "digest")
    performed(plan, HttpFabricClient(fabric.http, fabric.model_name), folder, on_event)


def run_in_router(fabric, _, on_event):
    created = fabric.http.post("/v1/scenarios", json={"yaml": SCENARIO, "run": "dn"})
    assert created.status_code == 202, created.text
    with fabric.http.stream("GET", "/v1/scenarios/dn?stream=true") as response:
        name = ""
        for line in response.iter_lines():
            name = line.removeprefix("event: ") if line.startswith("event: ") else name
            if not line.startswith("data: "):
                continue
            row = json.loads(line.removeprefix("data: "))
            if name == "run.ended":
                assert row["state"] == "ended", row
                return
            event = read_event(name, row["event"]) if "event" in row else None
            if event is not None:
                on_event(event)


@pytest.mark.slow
@pytest.mark.parametrize("run", sample([run_over_http, run_in_router], run_in_router))
def test_run_continues_after_its_agents_node_is_lost(tmp_path, run):
    events, killed = [], threading.Event()
    with process_fabric(tmp_path, "recall", "mac-a", "mac-b", "mac-c", step_s=0.05) as fabric:
        fabric.await_agents()

        def on_event(event):
            events.append(event)
            spoke = isinstance(event, AgentSpoke) and event.utterance.speaker == "zed"
            if spoke and not killed.is_set():
                killed.set()
                kill_mac_b(fabric)

        began_s = time.monotonic()
        run(fabric, tmp_path / "journals", on_event)
        assert time.monotonic() - began_s < ENDED_S
        shown = fabric.http.get("/v1/agents/scn.deadnode.kim/directives").json()
    assert shown["directives"], "the replica holds the directive"
    edited = [event.agent for event in events if isinstance(event, MemoryEdited)]
    assert edited == ["kim", "sam"]
    forked = [event.agent for event in events if isinstance(event, AgentCopied) and event.source]
    assert forked == ["heir"]
    deferred = [
        e for e in events if isinstance(e, Waited) and "edited after its next answer" in e.why
    ]
    assert all("sam" in each.what for each in deferred), "the replica takes over the other agent"
    if run is run_over_http:  # in the router the run continues while the node is killed
        assert len(deferred) == 1
    verdicts = [v for e in events if isinstance(e, PhaseEnded) for v in e.verdicts]
    assert [v for v in verdicts if not v.holds] == []
