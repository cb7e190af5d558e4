import pytest

from fabric.turn.generation import Delta, Finished, FinishReason
from tests.router.fake_node import MODEL, FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio


async def test_models():
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="org/other")]
    async with rig(nodes=nodes) as made:
        client = made.openai()
        listed = [model.id async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)
        slashed = await made.http().get("/v1/models/org/other")
        missing = await made.http().get("/v1/models/nothing")

    assert listed == [MODEL, "org/other"]
    assert (one.id, one.object, one.owned_by) == (MODEL, "model", "macfabric")
    assert slashed.json()["id"] == "org/other"
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_agents_are_shown_as_they_are_now():
    async with rig() as made:
        answer = await made.chat("hello there", agent="alice")
        await made.chat("something else")
        http = made.http()
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


async def test_health_knows_of_an_unsaved_turn_once_its_answer_ends():
    async with rig("a") as made:
        node, http = made["node-a"], made.http()
        assert (await http.get("/healthz")).json()["status"] == "ok"
        node.view_changes["degraded"] = "the data folder is gone"
        node.does.events = [Delta(0, "x"), Finished(FinishReason.STOP, 1, durable=False)]
        await made.chat("hello")
        assert (await http.get("/healthz")).json()["status"] == "degraded"


async def test_erase_everywhere_with_a_receipt():
    async with rig() as made:
        source = (await made.chat("x" * 200, agent="alice")).headers["x-macfabric-node"]
        target = "node-b" if source != "node-b" else "node-c"
        http = made.http()
        await http.post("/v1/agents/alice/migrate", json={"to": target})
        erased = (await http.delete("/v1/agents/alice")).json()
        again = await http.delete("/v1/agents/alice")
        after = await made.chat("x" * 200, agent="alice")

    assert erased["deleted"] is True
    assert erased["unreachable"] == []
    assert {receipt["node"] for receipt in erased["receipts"]} == {source, target}
    assert erased["blocks_removed"] == 8
    assert again.status_code == 404
    assert after.headers["x-macfabric-match"] == "none"
    assert int(after.headers["x-macfabric-epoch"]) > 2, "above what was erased, wherever it is"


async def test_erasure_reaches_a_node_that_was_away_when_it_is_back():
    async with rig(scale=4.0) as made:
        name = (await made.chat("secret", agent="alice")).headers["x-macfabric-node"]
        await made[name].stop()
        http = made.http()
        erased = (await http.delete("/v1/agents/alice")).json()
        assert made[name].memory
        await made[name].restart()
        await until(lambda: not made[name].memory)

    assert erased["deleted"] is False
    assert erased["unreachable"] == [name]


async def test_nodes():
    async with rig("ab", scale=4.0) as made:
        await made.chat("hello", agent="alice")
        http = made.http()
        await made["node-b"].stop()
        await until(lambda: not made.fleet.is_up("node-b"))
        nodes = (await http.get("/v1/nodes")).json()["data"]
        unknown = await http.post("/v1/nodes/node-z/flush", json={})
        bodiless = await http.post("/v1/nodes/node-a/flush")

    first, second = nodes
    assert (first["name"], first["state"]) == ("node-a", "ready")
    assert (second["name"], second["state"]) == ("node-b", "expired")
    wanted = {"host", "pid", "model", "fingerprint", "agents", "tokens", "bytes", "addresses"}
    wanted |= {"epoch", "incarnation"}
    assert wanted <= first.keys()
    assert first["addresses"][0]["kind"] == "loopback"
    assert sum(node["epoch"] for node in nodes) == 1
    assert unknown.status_code == 404
    assert "node-a, node-b" in unknown.json()["error"]["message"]
    assert bodiless.status_code == 200


async def test_a_template_in_an_unknown_format_is_listed():
    odd = FakeNode("node-b")
    odd.view_changes = {"template_warning": "calls are shown as text"}
    async with rig(nodes=[FakeNode("node-a"), odd]) as made:
        nodes = (await made.http().get("/v1/nodes")).json()["data"]

    assert [node["template_warning"] for node in nodes] == [None, "calls are shown as text"]


async def test_health():
    failing = FakeNode("node-b")
    async with rig(nodes=[FakeNode("node-a"), failing]) as made:
        http = made.http()
        good = await http.get("/healthz")
        failing.view_changes = {
            "degraded": "no space left on device",
            "damaged_blocks": 3,
            "reuse": False,
        }
        await made.fleet.membership.refresh()
        degraded = await http.get("/healthz")
        made.fleet.membership.find("node-a").heartbeat_s -= 60
        made.fleet.membership.find("node-b").heartbeat_s -= 60
        bad = await http.get("/healthz")

    assert (good.status_code, good.json()["status"]) == (200, "ok")
    assert good.json()["nodes"][0]["self_test"]["passed"] is True
    assert (degraded.status_code, degraded.json()["status"]) == (200, "degraded")
    assert degraded.json()["nodes"][1]["degraded"] == "no space left on device"
    assert [node["reuse"] for node in degraded.json()["nodes"]] == [True, False]
    assert [node["damaged_blocks"] for node in degraded.json()["nodes"]] == [0, 3]
    assert (bad.status_code, bad.json()["status"]) == (503, "unavailable")


async def test_metrics():
    async with rig("ab") as made:
        made["node-b"].view_changes = {
            "scrubbed_bytes": 5_000,
            "damaged_blocks": 2,
            "hot_limit_bytes": 700,
            "hot_total_bytes": 800,
            "memory_pressure": "critical",
            "thermal_state": "serious",
        }
        await made.fleet.membership.refresh()
        await made.chat("hello", agent="alice")
        await made.chat("hello", "x", "y", agent="alice")
        await made.openai().models.list()
        await made.chat("hello", model="nothing")
        metrics = (await made.http().get("/metrics")).text

    assert 'macfabric_requests_total{outcome="ok"} 2.0' in metrics
    assert 'macfabric_requests_total{outcome="rejected"} 1.0' in metrics
    assert 'macfabric_cached_tokens_total{tier="hot"} 11.0' in metrics
    assert 'macfabric_ttft_seconds_count{cache="cold"} 1.0' in metrics
    assert 'macfabric_nodes{state="alive"} 2.0' in metrics
    assert 'macfabric_node_up{node="node-a"} 1.0' in metrics
    assert 'macfabric_scrubbed_bytes{node="node-b"} 5000.0' in metrics
    assert 'macfabric_damaged_blocks{node="node-b"} 2.0' in metrics
    assert 'macfabric_hot_bytes{kind="limit",node="node-b"} 700.0' in metrics
    assert 'macfabric_memory_pressure{node="node-b"} 2.0' in metrics
    assert 'macfabric_memory_pressure{node="node-a"} 0.0' in metrics
    assert 'macfabric_thermal_state{node="node-b"} 2.0' in metrics
    assert "alice" not in metrics
    assert "default" not in metrics
