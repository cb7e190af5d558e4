"""Runs that quote an erased agent are named by the receipt or removed with it."""

import errno

import pytest

from router.runs import runs as module
from router.runs.run_folders import RunFolders
from tests.router.rig import KEY, OTHER_KEY, rig, until
from tests.router.runs.test_runs_api import TENANTS, code_of, events_until_end, start_run

pytestmark = pytest.mark.anyio


async def test_erasure_receipt_names_runs_quoting_agent(tmp_path):
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as fabric:
        one, two = fabric.http(KEY, operates=False), fabric.http(OTHER_KEY, operates=False)
        await start_run(one)
        await events_until_end(one)
        await start_run(two)
        await events_until_end(two)
        agents = [row["id"] for row in (await one.get("/v1/agents")).json()["data"]]
        first = (await one.delete(f"/v1/agents/{agents[0]}")).json()
        await one.delete("/v1/scenarios/first")
        second = (await one.delete(f"/v1/agents/{agents[1]}")).json()
        others = (await two.delete(f"/v1/agents/{agents[1]}")).json()
    assert (first["deleted"], first["quoting_runs"]) == (True, ["first"])
    assert (second["deleted"], second["quoting_runs"]) == (True, [])
    assert others["quoting_runs"] == ["first"], "the other tenant's own run"


async def test_erasure_with_runs_removes_ended_runs_quoting_agent(tmp_path):
    async with rig("a", settings=TENANTS, runs_dir=tmp_path) as fabric:
        one, two = fabric.http(KEY, operates=False), fabric.http(OTHER_KEY, operates=False)
        for http in (one, two):
            await start_run(http)
            await events_until_end(http)
        agents = [row["id"] for row in (await one.get("/v1/agents")).json()["data"]]
        wrong = await one.delete(f"/v1/agents/{agents[0]}?runs=all")
        receipt = (await one.delete(f"/v1/agents/{agents[0]}?runs=true")).json()
        gone = await one.get("/v1/scenarios/first")
        other = await two.get("/v1/scenarios/first")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "runs")
    assert (receipt["removed_runs"], receipt["quoting_runs"]) == (["first"], [])
    assert code_of(gone) == (404, "run_not_found")
    assert other.status_code == 200, "another tenant's run of that name"
    assert len(list(tmp_path.glob("*/run.json"))) == 1


async def test_undeletable_run_is_still_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "read-only")

    async with rig("a", runs_dir=tmp_path) as fabric:
        http = fabric.http()
        await start_run(http)
        await events_until_end(http)
        agent = (await http.get("/v1/agents")).json()["data"][0]["id"]
        monkeypatch.setattr(RunFolders, "remove", refuse)
        receipt = (await http.delete(f"/v1/agents/{agent}?runs=true")).json()
        kept = await http.get("/v1/scenarios/first")
    assert (receipt["removed_runs"], receipt["quoting_runs"]) == ([], ["first"])
    assert kept.status_code == 200


async def test_active_run_is_still_named(tmp_path):
    async with rig("a", runs_dir=tmp_path) as fabric:
        http, node = fabric.http(), fabric["node-a"]
        node.behaviour.first_delay_s = 0.2
        await start_run(http)
        await until(lambda: node.requests)
        node.behaviour.first_delay_s = 3600.0
        await until(lambda: len(node.requests) == 2)
        agent = (await http.get("/v1/agents")).json()["data"][0]["id"]
        receipt = (await http.delete(f"/v1/agents/{agent}?runs=true")).json()
        shown = (await http.get("/v1/scenarios/first")).json()
        await http.delete("/v1/scenarios/first")
    assert (receipt["removed_runs"], receipt["quoting_runs"]) == ([], ["first"])
    assert shown["state"] == "running"


@pytest.mark.parametrize("by_erasure", [False, True])
async def test_run_resumed_during_deletion_is_not_reported_removed(
    tmp_path, monkeypatch, by_erasure
):
    forget = module.Runs._delete

    async def forget_late(runs, hosted):
        await start_run(http)
        return await forget(runs, hosted)

    async with rig("a", runs_dir=tmp_path) as fabric:
        http, node = fabric.http(), fabric["node-a"]
        node.behaviour.first_delay_s = 0.2
        await start_run(http)
        await until(lambda: node.requests)
        node.behaviour.first_delay_s = 3600.0
        await until(lambda: len(node.requests) == 2)
        await http.delete("/v1/scenarios/first")
        agent = (await http.get("/v1/agents")).json()["data"][0]["id"]
        with monkeypatch.context() as patch:
            patch.setattr(module.Runs, "_delete", forget_late)
            path = f"/v1/agents/{agent}?runs=true" if by_erasure else "/v1/scenarios/first"
            answer = (await http.delete(path)).json()
        shown = (await http.get("/v1/scenarios/first")).json()
        await http.delete("/v1/scenarios/first")
    assert shown["state"] == "running"
    assert not answer["removed_runs" if by_erasure else "deleted"]
