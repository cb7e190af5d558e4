"""Scenario runs in the router: started, followed, resumed, cancelled, deleted."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from fabric.settings import RouterSettings
from router.limits import SCENARIO_REQUEST_BYTES_MAX
from router.runs import runs as module
from router.scenario.source import ScenarioSource, shipped_names
from tests.router.fake_node import FakeNode
from tests.router.rig import KEY, OTHER_KEY, rig, until
from tests.router.sse_reader import Reader

pytestmark = pytest.mark.anyio
TENANTS = RouterSettings(
    api_keys={"one": KEY, "two": OTHER_KEY}, loopback_without_key=False, takeover_after_s=20.0
)
YAML = """
scenario: two-rooms
title: Two rooms
variables: {city: Oslo}
defaults: {max_tokens: 1, temperature: 0}
agents: {marco: {}, danny: {}}
phases:
  - {id: cell, agents: [marco], visible_to: [], prompts: {marco: "The secret is otter. ${city}"}}
  - id: yard
    agents: [danny, marco]
    rounds: 2
    ask: {danny: What is new, marco: The code is}
    expect: [{agent: danny, never_hears: otter}]
"""
OTHER_YAML = YAML.replace("two-rooms", "other-rooms")


async def start_run(http, status=202, **body):
    response = await http.post("/v1/scenarios", json=body or {"yaml": YAML, "run": "first"})
    assert response.status_code == status, response.text
    return response.json()


@asynccontextmanager
async def following(http, run="first", after=None, *, by_query=False):
    headers = {"last-event-id": after} if after else {}
    headers |= {} if by_query else {"accept": "text/event-stream"}
    path = f"/v1/scenarios/{run}" + ("?stream=true" if by_query else "")
    async with http.stream("GET", path, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Reader(response)


async def events_until_end(http, run="first"):
    async with following(http, run) as stream:
        return await stream.until("run.ended")


def turns_of(events):
    return [
        (event.data["event"]["utterance"]["phase"], event.data["event"]["utterance"]["speaker"])
        for event in events
        if event.name == "turn.ended"
    ]


def code_of(response):
    return response.status_code, response.json()["error"]["code"]


ORDER = [("cell", "marco"), *[("yard", "danny"), ("yard", "marco")] * 2]


async def test_run_is_started_followed_shown_and_deleted(tmp_path):
    async with rig("ab", runs_dir=tmp_path / "runs") as fabric:
        http = fabric.http()
        started = await start_run(http)
        async with following(http, by_query=True) as stream:
            events = await stream.until("run.ended")
            assert await stream.next() is None, "the stream ends with the run"
        shown = (await http.get("/v1/scenarios/first")).json()
        listed = (await http.get("/v1/scenarios")).json()["data"]
        written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
        modes = {path.stat().st_mode & 0o077 for path in written}
        again = await start_run(http, 200, yaml=YAML, run="first")
        forgotten = (await http.delete("/v1/scenarios/first")).json()
        gone = await http.get("/v1/scenarios/first")

    assert (started["id"], started["state"]) == ("first", "running")
    assert started["turns"] == {"done": 0, "total": 5}
    names = [event.name for event in events]
    assert names[:2] == ["run.began", "arm.began"]
    assert names.count("turn.began") == 5
    assert turns_of(events) == ORDER
    assert events[-1].data["holds"] is True
    assert "otter" not in json.dumps([event.data for event in events]), "events contain no prompt"
    (performed,) = shown["runs"]
    assert [(u["phase"], u["speaker"]) for u in performed["transcript"]] == ORDER
    assert (shown["state"], shown["holds"], shown["turns"]["done"]) == ("ended", True, 5)
    assert {row["agent"] for row in performed["report"]} == {"marco", "danny"}
    assert listed == [{name: shown[name] for name in listed[0]}]
    assert again == listed[0]
    assert {path.name for path in written} == {
        "run.json", "script.json", "first.jsonl", "outcome.json", "end.json"
    }  # fmt: skip
    assert modes == {0}
    assert forgotten["deleted"] is True
    assert code_of(gone) == (404, "run_not_found")
    assert not list((tmp_path / "runs").iterdir())


async def test_shipped_scenario_runs_with_its_own_files_and_options(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        body = {"scenario": "gossip-network", "as": "tests"}
        started = await start_run(fabric.http(), **body)
        events = await events_until_end(fabric.http(), started["id"])
        agents = [agent["id"] for agent in (await fabric.http().get("/v1/agents")).json()["data"]]
    assert started["turns"]["total"] == len(turns_of(events)) == 18
    assert all(agent.startswith("scn.gossip-network@tests.") for agent in agents)


async def test_run_is_hidden_from_other_tenants(tmp_path):
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as fabric:
        one, two = fabric.http(KEY, operates=False), fabric.http(OTHER_KEY, operates=False)
        await start_run(one)
        await events_until_end(one)
        responses = [
            await two.get("/v1/scenarios/first"),
            await two.get("/v1/scenarios/first?stream=true"),
            await two.delete("/v1/scenarios/first"),
        ]
        listed = (await two.get("/v1/scenarios")).json()["data"]
        operators = await fabric.http().get("/v1/scenarios/first")
        await start_run(two, yaml=OTHER_YAML, run="first")
        own = (await one.get("/v1/scenarios/first")).json()
        of_one = {key for node in fabric.nodes.values() for key in node.memory}
    assert [code_of(response) for response in responses] == [(404, "run_not_found")] * 3
    assert listed == []
    assert code_of(operators) == (403, "tenant_required")
    assert own["scenario"] == "two-rooms"
    assert {("one", "scn.two-rooms.marco"), ("one", "scn.two-rooms.danny")} <= of_one


async def test_follower_resumes_after_last_event_id(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        await start_run(fabric.http())
        whole = await events_until_end(fabric.http())
        async with following(fabric.http(), after=whole[4].id) as stream:
            rest = await stream.until("run.ended")
        async with following(fabric.http(), after="of-another-process-4") as stream:
            replayed = await stream.until("run.ended")
    assert [event.id for event in rest] == [event.id for event in whole[5:]]
    assert replayed == whole


async def test_restarted_router_resumes_run_without_repeating_turns(tmp_path):
    nodes = [FakeNode("node-a")]
    async with rig(nodes=nodes, runs_dir=tmp_path) as fabric:
        fabric["node-a"].behaviour = replace(fabric["node-a"].behaviour, first_delay_s=0.0)
        await start_run(fabric.http())
        async with following(fabric.http()) as stream:
            before = await stream.until("turn.ended")
            before += await stream.until("turn.ended")
            fabric["node-a"].behaviour.first_delay_s = 3600.0
            fabric.app.state.runs.stop()
    requests_count = len([r for r in nodes[0].requests if r.identity.agent])
    nodes[0].behaviour.first_delay_s = 0.0
    async with rig(nodes=nodes, runs_dir=tmp_path) as fabric:
        events = await events_until_end(fabric.http())
        row = (await fabric.http().get("/v1/scenarios/first")).json()
    async with rig(nodes=nodes, runs_dir=tmp_path) as fabric:  # a third router, after the run's end
        later = await events_until_end(fabric.http())
        assert (await fabric.http().get("/v1/scenarios/first")).json() == row
    assert row["state"] == "ended"
    assert turns_of(events) == turns_of(later) == ORDER
    turns_begun = [event for event in events if event.name == "turn.began"]
    assert len(turns_begun) <= 3, "turns in the journal are not repeated"
    assert len(nodes[0].requests) - requests_count == len(turns_begun)


async def test_run_that_cannot_resume_reports_its_error(tmp_path):
    nodes = [FakeNode("node-a")]
    async with rig(nodes=nodes, settings=TENANTS, runs_dir=tmp_path) as fabric:
        fabric["node-a"].behaviour.first_delay_s = 3600.0
        for key in (KEY, OTHER_KEY):
            await start_run(fabric.http(key))
        await until(lambda: len(nodes[0].requests) == 2)
        fabric.app.state.runs.stop()
    nodes[0].behaviour.first_delay_s = 0.0
    for path in tmp_path.rglob("*.jsonl"):
        path.write_bytes(path.read_bytes() + b"{}\n")
    left = replace(TENANTS, api_keys={"one": KEY})
    async with rig(nodes=nodes, settings=left, runs_dir=tmp_path) as fabric:
        events = await events_until_end(fabric.http(KEY))
        states = {k[0]: r.row()["error"]["code"] for k, r in fabric.app.state.runs._runs.items()}
    assert events[-1].data["state"] == "failed"
    assert "line 2" in events[-1].data["message"]
    assert str(tmp_path) not in events[-1].data["message"]
    assert states == {"one": "corrupt_data", "two": "tenant_unknown"}


async def test_list_names_the_shipped_scenarios(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        shipped = (await fabric.http().get("/v1/scenarios")).json()["shipped"]

    assert {"name": "debate", "title": "A debate with a judge"} in shipped
    assert [row["name"] for row in shipped] == list(shipped_names())


async def test_unreadable_run_is_replaced(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        await start_run(fabric.http())
        await events_until_end(fabric.http())
    (run_file,) = tmp_path.glob("*/run.json")
    run_file.write_text('{"format": 9}')
    async with rig("a", runs_dir=tmp_path) as fabric:
        assert (await fabric.http().get("/v1/scenarios")).json()["data"] == []
        await start_run(fabric.http())
        assert turns_of(await events_until_end(fabric.http())) == ORDER


async def test_cancelled_run_is_kept_and_can_resume(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        http, node = fabric.http(), fabric["node-a"]
        node.behaviour.first_delay_s = 3600.0
        await start_run(http)
        await until(lambda: node.requests)
        async with following(http) as stream:
            cancelled = (await http.delete("/v1/scenarios/first")).json()
            events = await stream.until("run.ended")
        shown = (await http.get("/v1/scenarios/first")).json()
        node.behaviour.first_delay_s = 0.0
        await start_run(http)
        again = await events_until_end(http)
    assert (cancelled["cancelled"], cancelled["deleted"]) == (True, False)
    assert events[-1].data["state"] == shown["state"] == "cancelled"
    assert shown["holds"] is None
    assert turns_of(again) == ORDER


async def test_queued_run_can_be_followed_and_cancelled(tmp_path, monkeypatch):
    nodes = [FakeNode("node-a")]
    nodes[0].behaviour.first_delay_s = 3600.0
    async with rig(nodes=nodes, runs_dir=tmp_path) as fabric:
        await start_run(fabric.http())
        await until(lambda: nodes[0].requests)
        fabric.app.state.runs.stop()
    monkeypatch.setattr(module, "SCENARIO_RUNS_MAX", 0)
    async with rig(nodes=nodes, runs_dir=tmp_path) as fabric, following(fabric.http()) as stream:
        assert (await fabric.http().get("/v1/scenarios/first")).json()["state"] == "running"
        cancelled = (await fabric.http().delete("/v1/scenarios/first")).json()
        events = await stream.until("run.ended")
    assert cancelled["cancelled"] is True
    assert events[-1].data["state"] == "cancelled"
    async with rig(nodes=nodes, runs_dir=tmp_path) as fabric:
        assert (await fabric.http().get("/v1/scenarios/first")).json()["state"] == "cancelled"


async def test_cold_arm_and_repeats_run_in_order(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        started = await start_run(
            fabric.http(), yaml=YAML, cold=True, repeat=2, set={"city": "Bergen"}
        )
        events = await events_until_end(fabric.http(), started["id"])
        shown = (await fabric.http().get(f"/v1/scenarios/{started['id']}")).json()
    arms = [
        (event.data["number"], event.data["arm"]) for event in events if event.name == "arm.began"
    ]
    assert arms == [(1, "cold"), (1, "warm"), (2, "cold"), (2, "warm")]
    assert shown["turns"] == {"done": 20, "total": 20}
    assert [saving["phase"] for saving in shown["savings"]] == ["cell", "yard", None] * 2


async def test_invalid_scenario_is_rejected_with_its_position(tmp_path):
    wrong = YAML.replace("[danny, marco]", "[dany, marco]")
    cases = [
        ({"yaml": wrong}, 400, "invalid_scenario"),
        ({"yaml": "a: &x [*x]"}, 400, "invalid_scenario"),
        ({"scenario": "prisoner-dilemma"}, 404, "not_found"),
        ({"scenario": "debate", "yaml": YAML}, 400, "invalid_value"),
        ({}, 400, "invalid_value"),
        ({"yaml": YAML, "set": {"town": "Bergen"}}, 400, "invalid_value"),
        ({"yaml": YAML, "run": "Not a name"}, 400, "invalid_value"),
        ({"yaml": YAML, "model": "none"}, 404, "model_not_found"),
        ({"yaml": YAML, "repeat": 99}, 400, "invalid_value"),
        ({"yaml": YAML.replace("rounds: 2", "rounds: 1000")}, 400, "invalid_scenario"),
        ({"yaml": "x" * SCENARIO_REQUEST_BYTES_MAX}, 413, "too_large"),
        ({"yaml": YAML.replace("What is new", "{file: a.txt}")}, 400, "invalid_scenario"),
    ]
    async with rig("a", runs_dir=tmp_path) as fabric:
        http = fabric.http()
        responses = [await http.post("/v1/scenarios", json=body) for body, *_ in cases]
        with_file = dict(cases[-1][0], files={"a.txt": "What is new"})
        await start_run(http, **with_file)
    assert [code_of(each) for each in responses] == [(status, code) for _, status, code in cases]
    place = responses[0].json()["error"]["message"]
    assert place.startswith("scenario.yaml:10:14: phases[1].agents[0]: 'dany' is not an agent;")
    async with rig("a") as fabric:
        nowhere = await fabric.http().post("/v1/scenarios", json={"yaml": YAML})
    assert code_of(nowhere) == (503, "no_runs")


async def test_scenario_text_is_parsed_off_the_event_loop(tmp_path, monkeypatch):
    threads, read = [], ScenarioSource.read

    def record_and_read(script):
        threads.append(threading.current_thread())
        return read(script)

    monkeypatch.setattr(ScenarioSource, "read", record_and_read)
    async with rig("a", runs_dir=tmp_path) as fabric:
        bomb = "scenario: [" + "a, " * 30_000 + "]"
        assert code_of(await fabric.http().post("/v1/scenarios", json={"yaml": bomb}))[0] == 400
    assert threads
    assert threading.main_thread() not in threads


async def test_run_names_and_agents_are_exclusive(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        http = fabric.http()
        fabric["node-a"].behaviour.first_delay_s = 3600.0
        bodies = [
            {"yaml": YAML, "run": "first"},
            {"yaml": YAML, "run": "first"},
            {"yaml": YAML + "\n", "run": "first"},
            {"yaml": YAML, "run": "second"},
            {"yaml": YAML, "run": "second", "as": "mine"},
        ]
        responses = [await http.post("/v1/scenarios", json=body) for body in bodies]
    assert [each.status_code for each in responses] == [202, 202, 409, 409, 202]
    assert [code_of(each)[1] for each in responses[2:4]] == ["other_run", "agents_in_use"]


async def test_active_runs_are_bounded_and_old_ones_are_evicted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SCENARIO_RUNS_MAX", 2)
    monkeypatch.setattr(module, "SCENARIO_ENDED_MAX", 2)
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as fabric:
        one, two, node = fabric.http(KEY), fabric.http(OTHER_KEY), fabric["node-a"]
        node.behaviour.first_delay_s = 3600.0
        await start_run(one, yaml=YAML)
        full = await one.post("/v1/scenarios", json={"yaml": OTHER_YAML})
        await start_run(two, yaml=YAML, run="kept")
        node.behaviour.first_delay_s = 0.0
        await two.delete("/v1/scenarios/kept")
        (row,) = (await one.get("/v1/scenarios")).json()["data"]
        await one.delete(f"/v1/scenarios/{row['id']}")
        for name in ("b", "c"):
            await start_run(one, yaml=YAML, run=name)
            await events_until_end(one, name)
        await until(lambda: len(fabric.app.state.runs._runs) == 2)
        left = [row["id"] for row in (await one.get("/v1/scenarios")).json()["data"]]
        kept = [row["id"] for row in (await two.get("/v1/scenarios")).json()["data"]]
    assert code_of(full) == (429, "too_many_runs")
    assert full.headers["retry-after"]
    assert (left, kept) == (["c"], ["kept"]), "the tenant with most runs loses its oldest"
    assert len(list(tmp_path.iterdir())) == 2


async def test_idle_run_stream_sends_keepalives(tmp_path, monkeypatch):
    monkeypatch.setattr("router.http.sse.STREAM_SILENCE_S", 0.02)
    async with rig("a", runs_dir=tmp_path) as fabric:
        fabric["node-a"].behaviour.first_delay_s = 3600.0
        await start_run(fabric.http())
        async with following(fabric.http()) as stream:
            await stream.until("turn.began")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stream.next()
        assert len(stream.comments) > 3
        head = await fabric.http().head("/v1/scenarios/first?stream=true")
        assert head.status_code == 200
        await until(lambda: not _followers(fabric))


async def test_excess_followers_get_429(tmp_path, monkeypatch):
    monkeypatch.setattr("router.runs.run_log.SCENARIO_FOLLOWERS_MAX", 0)
    async with rig("a", runs_dir=tmp_path) as fabric:
        await start_run(fabric.http())
        response = await fabric.http().get("/v1/scenarios/first?stream=true")
    assert code_of(response) == (429, "overloaded")


def _followers(fabric):
    return sum(run._log.followers_count for run in fabric.app.state.runs._runs.values())
