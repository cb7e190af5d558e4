import pytest
from prometheus_client.parser import text_string_to_metric_families

from fabric.control.node_calls import Done, Restart
from fabric.control.usage_view import ExitView, UsageView
from fabric.turn.generation import Delta, Finished, FinishReason
from tests.router.fake_node import MODEL, FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio


async def test_models_are_listed_and_retrieved():
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="org/other")]
    async with rig(nodes=nodes) as fabric:
        client = fabric.openai()
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)
        slashed = await fabric.http().get("/v1/models/org/other")
        missing = await fabric.http().get("/v1/models/nothing")

    assert listed == [MODEL, "org/other"]
    assert (one.id, one.object, one.owned_by) == (MODEL, "model", "macfabric")
    assert slashed.json()["id"] == "org/other"
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_agents_are_shown_with_current_state():
    async with rig() as fabric:
        answer = await fabric.chat("hello there", agent="alice")
        await fabric.chat("something else")
        http = fabric.http()
        listed = (await http.get("/v1/agents")).json()
        shown = (await http.get("/v1/agents/alice")).json()
        node = answer.headers["x-macfabric-node"]
        flushed = await http.post(f"/v1/nodes/{node}/flush", json={"drop_hot": True})
        cooled = (await http.get("/v1/agents/alice")).json()
        missing = await http.get("/v1/agents/bob")
        malformed = await http.get("/v1/agents/a%20b")

    assert listed["object"] == "list"
    assert len(listed["data"]) == 2
    assert shown["owner"] == node
    assert shown["epoch"] == 1
    assert shown["tokens"] == len("<user>hello there")
    assert shown["blocks"] == 1
    assert shown["tiers"] == ["hot", "disk"]
    assert shown["bytes"] == {"hot": 17, "disk": 17}
    assert shown["last_match"]["kind"] == "none"
    assert shown["busy"] is False
    assert (shown["directives"], shown["replicas"]) == ([], [])
    assert flushed.json() == {"node": node, "detail": "durable"}
    assert cooled["tiers"] == ["disk"]
    assert missing.status_code == 404
    assert malformed.status_code == 400


async def test_health_is_degraded_after_an_unsaved_turn():
    async with rig("a") as fabric:
        node, http = fabric["node-a"], fabric.http()
        assert (await http.get("/healthz")).json()["status"] == "ok"
        node.view_changes["degraded"] = "the data folder is gone"
        node.behaviour.events = [Delta(0, "x"), Finished(FinishReason.STOP, 1, durable=False)]
        await fabric.chat("hello")
        assert (await http.get("/healthz")).json()["status"] == "degraded"


async def test_erasure_removes_all_copies_and_returns_receipts():
    async with rig() as fabric:
        source = (await fabric.chat("x" * 200, agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if source != "node-b" else "node-c"
        http = fabric.http()
        await http.post("/v1/agents/alice/migrate", json={"to": target})
        erased = (await http.delete("/v1/agents/alice")).json()
        again = await http.delete("/v1/agents/alice")
        after = await fabric.chat("x" * 200, agent="alice")

    assert erased["deleted"] is True
    assert erased["unreachable"] == []
    assert {receipt["node"] for receipt in erased["receipts"]} == {source, target}
    assert erased["blocks_removed"] == 8
    assert again.status_code == 404
    assert after.headers["x-macfabric-match"] == "none"
    assert int(after.headers["x-macfabric-epoch"]) > 2, "above every erased epoch"


async def test_erasure_reaches_returning_node():
    async with rig(scale=4.0) as fabric:
        name = (await fabric.chat("secret", agent="alice")).headers["x-macfabric-node"]
        await fabric[name].stop()
        http = fabric.http()
        erased = (await http.delete("/v1/agents/alice")).json()
        assert fabric[name].memory
        await fabric[name].restart()
        await until(lambda: not fabric[name].memory)

    assert erased["deleted"] is False
    assert erased["unreachable"] == [name]


async def test_nodes_are_listed_with_state():
    async with rig("ab", scale=4.0) as fabric:
        await fabric.chat("hello", agent="alice")
        http = fabric.http()
        await fabric["node-b"].stop()
        await until(lambda: not fabric.fleet.is_up("node-b"))
        nodes = (await http.get("/v1/nodes")).json()["data"]
        unknown = await http.post("/v1/nodes/node-z/flush", json={})
        bodiless = await http.post("/v1/nodes/node-a/flush")

    first, second = nodes
    assert (first["name"], first["state"]) == ("node-a", "ready")
    assert (second["name"], second["state"]) == ("node-b", "expired")
    expected = {"host", "pid", "model", "fingerprint", "agents", "tokens", "bytes", "addresses"}
    expected |= {"epoch", "incarnation"}
    assert expected <= first.keys()
    assert first["addresses"][0]["kind"] == "loopback"
    assert sum(node["epoch"] for node in nodes) == 1
    assert unknown.status_code == 404
    assert "node-a, node-b" in unknown.json()["error"]["message"]
    assert bodiless.status_code == 200


async def test_node_is_restarted_by_operators_only():
    async with rig("ab") as fabric:
        http, node = fabric.http(), fabric["node-a"]
        older = await http.post("/v1/nodes/node-a/restart", json={"wait_s": 5})
        node._handlers[Restart] = lambda call: Done(f"waited {call.wait_s:g} s")
        path = "/v1/nodes/node-a/restart"
        restarted = await http.post(path, json={"wait_s": 5})
        unbounded = await http.post(path, json={"wait_s": 1e9})
        tenant = await fabric.http(operates=False).post(path, json={"wait_s": 5})
        router = await http.post("/v1/router/restart", json={"wait_s": 5})

    assert (older.status_code, older.json()["error"]["code"]) == (409, "cannot_restart")
    assert restarted.status_code == 202
    assert restarted.json()["detail"] == "waited 5 s"
    assert unbounded.status_code == 400
    assert tenant.status_code in {401, 403}
    assert (router.status_code, router.json()["error"]["code"]) == (409, "cannot_restart")


async def test_unknown_template_format_is_listed_as_warning():
    odd = FakeNode("node-b")
    odd.view_changes = {"template_warning": "calls are shown as text"}
    async with rig(nodes=[FakeNode("node-a"), odd]) as fabric:
        nodes = (await fabric.http().get("/v1/nodes")).json()["data"]

    assert [node["template_warning"] for node in nodes] == [None, "calls are shown as text"]


async def test_health_reports_ok_degraded_and_unavailable():
    failing = FakeNode("node-b")
    async with rig(nodes=[FakeNode("node-a"), failing]) as fabric:
        http = fabric.http()
        good = await http.get("/healthz")
        failing.view_changes = {
            "degraded": "no space left on device",
            "damaged_blocks": 3,
            "reuse": False,
        }
        await fabric.fleet.membership.refresh()
        degraded = await http.get("/healthz")
        fabric.fleet.membership.find("node-a").heartbeat_s -= 60
        fabric.fleet.membership.find("node-b").heartbeat_s -= 60
        bad = await http.get("/healthz")

    assert (good.status_code, good.json()["status"]) == (200, "ok")
    assert good.json()["nodes"][0]["self_test"]["passed"] is True
    assert (degraded.status_code, degraded.json()["status"]) == (200, "degraded")
    assert degraded.json()["nodes"][1]["degraded"] == "no space left on device"
    assert [node["reuse"] for node in degraded.json()["nodes"]] == [True, False]
    assert [node["damaged_blocks"] for node in degraded.json()["nodes"]] == [0, 3]
    assert (bad.status_code, bad.json()["status"]) == (503, "unavailable")


async def test_metrics_count_requests_and_gauge_nodes():
    async with rig("ab") as fabric:
        fabric["node-b"].view_changes = {
            "scrubbed_bytes": 5_000,
            "damaged_blocks": 2,
            "hot_limit_bytes": 700,
            "hot_total_bytes": 800,
            "memory_pressure": "critical",
            "thermal_state": "serious",
            "usage": UsageView(process_bytes=900, disk_limit_bytes=1000),
            "evicted_agents": 7,
            "degraded": "no space left on device",
            "certificate_ends_s": 1.8e9,
            "last_exit": ExitView(1.7e9, "killed", "ended without a trace"),
        }
        await fabric.fleet.membership.refresh()
        await fabric.chat("hello", agent="alice")
        await fabric.chat("hello", "x", "y", agent="alice")
        await fabric.openai().models.list()
        await fabric.chat("hello", model="nothing")
        metrics = (await fabric.http().get("/metrics")).text

    assert 'macfabric_requests_total{outcome="ok"} 2.0' in metrics
    assert 'macfabric_requests_total{outcome="rejected"} 1.0' in metrics
    assert 'macfabric_cached_tokens_total{tier="hot"} 11.0' in metrics
    assert 'macfabric_saved_seconds_total{tier="hot"}' in metrics
    assert 'macfabric_ttft_seconds_count{cache="cold"} 1.0' in metrics
    assert 'macfabric_nodes{state="alive"} 2.0' in metrics
    assert 'macfabric_node_up{node="node-a"} 1.0' in metrics
    assert 'macfabric_scrubbed_bytes_total{node="node-b"} 5000.0' in metrics
    assert 'macfabric_damaged_blocks_total{node="node-b"} 2.0' in metrics
    assert 'macfabric_hot_bytes{kind="limit",node="node-b"} 700.0' in metrics
    assert 'macfabric_memory_pressure{node="node-b"} 2.0' in metrics
    assert 'macfabric_memory_pressure{node="node-a"} 0.0' in metrics
    assert 'macfabric_thermal_state{node="node-b"} 2.0' in metrics
    assert 'macfabric_thermal_state{node="node-a"} 0.0' in metrics
    assert "macfabric_turn_seconds_count 2.0" in metrics
    assert 'macfabric_turn_part_seconds_sum{part="decode"} 4.0' in metrics
    chats = 'method="POST",route="/v1/chat/completions"'
    assert f'macfabric_http_responses_total{{class="2xx",{chats}}} 2.0' in metrics
    assert f'macfabric_http_responses_total{{class="4xx",{chats}}} 1.0' in metrics
    assert 'macfabric_node_state{node="node-b",state="ready"} 1.0' in metrics
    assert 'macfabric_disk_bytes{kind="limit",node="node-b"} 1000.0' in metrics
    assert 'macfabric_memory_bytes{kind="process",node="node-b"} 900.0' in metrics
    assert 'kind="arrays",node="node-b"' not in metrics
    assert 'macfabric_evicted_agents_total{node="node-b"} 7.0' in metrics
    assert 'macfabric_node_degraded{node="node-b"} 1.0' in metrics
    assert 'macfabric_certificate_expiry_timestamp_seconds{node="node-b"} 1.8e+09' in metrics
    cause = 'cause="killed",node="node-b"'
    assert f"macfabric_node_last_exit_timestamp_seconds{{{cause}}} 1.7e+09" in metrics
    assert 'macfabric_node_build_info{fingerprint="ffffffffffffffff"' in metrics
    assert "macfabric_router_build_info{" in metrics
    assert "_created" not in metrics
    assert "alice" not in metrics
    assert "default" not in metrics


async def test_names_of_metrics_follow_the_conventions():
    async with rig("ab") as fabric:
        await fabric.chat("hello", agent="alice")
        metrics = (await fabric.http().get("/metrics")).text

    families = list(text_string_to_metric_families(metrics))
    assert len(families) == len({family.name for family in families}) > 50
    for family in families:
        assert family.name.startswith("macfabric_")
        assert family.documentation.endswith((".", ".)")), family.name
        assert not family.name.endswith(("_ms", "_mb", "_percent", "_total")), family.name
        for sample in family.samples:
            is_total = sample.name.endswith("_total")
            assert is_total == (family.type == "counter"), sample.name
            assert len(sample.labels.get("route", "")) < 60


async def test_answers_are_counted_by_route_and_not_by_url():
    async with rig("a") as fabric:
        http = fabric.http()
        for path in ("/v1/agents/secret-name", "/v1/agents/other-name", "/nowhere/at/all"):
            await http.get(path)
        await http.request("BREW", "/v1/nodes")
        metrics = (await http.get("/metrics")).text

    agent = 'class="4xx",method="GET",route="/v1/agents/{agent}"'
    assert f"macfabric_http_responses_total{{{agent}}} 2.0" in metrics
    assert 'class="4xx",method="GET",route="(other)"} 1.0' in metrics
    assert "secret-name" not in metrics
    assert "nowhere" not in metrics
    assert "BREW" not in metrics


async def test_operators_see_usage_versions_and_the_last_exit():
    async with rig("a") as fabric:
        lines = ("error: the device failed",)
        fabric["node-a"].view_changes = {
            "usage": UsageView(process_bytes=900, disk_limit_bytes=1000, chip="Apple M4"),
            "last_exit": ExitView(1.7e9, "crashed", "Fatal Python error: Aborted", lines),
            "build": {"macfabric": "0.1.0", "mlx": "0.32"},
        }
        await fabric.fleet.membership.refresh()
        (node,) = (await fabric.http().get("/v1/nodes")).json()["data"]
        (own,) = (await fabric.http(operates=False).get("/v1/nodes")).json()["data"]

    assert node["usage"]["process_bytes"] == 900
    assert node["usage"]["chip"] == "Apple M4"
    assert node["last_exit"]["lines"] == ["error: the device failed"]
    assert node["build"]["mlx"] == "0.32"
    assert not {"usage", "last_exit", "build"} & own.keys()
