import pytest

from fabric.control.node_calls import TierBytes
from fabric.errors import ConflictError
from fabric.settings import RouterSettings
from router.moves import drains
from tests.router.fake_copies import owned
from tests.router.fake_node import FakeNode
from tests.router.rig import KEY, OTHER_KEY, rig, until

pytestmark = pytest.mark.anyio
TWO_TENANTS = RouterSettings(api_keys={"one": KEY, "two": OTHER_KEY}, takeover_after_s=0.3)


@pytest.fixture(autouse=True)
def low_latency(monkeypatch):
    monkeypatch.setattr(drains, "DRAIN_ROUND_PAUSE_S", 0.02)


async def drain(fabric, node, http=None, verb="drain"):
    return await (http or fabric.http()).post(f"/v1/nodes/{node}/{verb}")


async def node_row(fabric, node, http=None):
    rows = (await (http or fabric.http()).get("/v1/nodes")).json()["data"]
    return {row["name"]: row for row in rows}[node]


async def drain_result(fabric, node, http=None):
    """Wait for the end of a drain; return its row."""
    await until(lambda: fabric.services.drains.find(node).ended_s is not None)
    return (await node_row(fabric, node, http))["drain"]


async def fill_node(fabric, node, sizes, **options):
    """Give a node agents with these numbers of words."""
    for other in fabric.nodes.values():
        other.is_draining = other.name != node
    await fabric.fleet.membership.refresh()
    for name, words in sizes.items():
        answer = await fabric.chat("word " * words, agent=name, **options)
        assert answer.headers["x-macfabric-node"] == node, answer.text
    for other in fabric.nodes.values():
        other.is_draining = False
    await fabric.fleet.membership.refresh()


async def test_drain_moves_smallest_agents_first_and_admits_none(monkeypatch):
    monkeypatch.setattr(drains, "DRAIN_AT_ONCE_MAX", 1)
    sizes = {"large": 3000, "small": 20, "middle": 600}
    nodes = [FakeNode(f"node-{letter}", copy_s=0.05) for letter in "abc"]
    async with rig(nodes=nodes) as fabric:
        await fill_node(fabric, "node-a", sizes)
        departures = []
        nodes[0].after["release_agent"] = lambda: note_departures(fabric, departures)
        started = await drain(fabric, "node-a")
        again = await drain(fabric, "node-a")
        done = await drain_result(fabric, "node-a")
        state = (await node_row(fabric, "node-a"))["state"]
        new = await fabric.chat("hello", agent="new")
        after = await fabric.chat("word " * 3000, "x", "y", agent="large")
        repeated = await drain(fabric, "node-a")
        done_again = await drain_result(fabric, "node-a")

    assert (started.status_code, started.json()["state"]) == (202, "draining")
    assert again.status_code == 202
    assert started.json()["agents_left"] == 3
    assert (done["state"], done["agents_moved"], done["agents_left"]) == ("drained", 3, 0)
    assert done["bytes_sent"] > 0
    assert done["seconds"] > 0
    assert (done["stuck"], done["stuck_others"]) == ([], 0)
    assert departures == ["small", "middle", "large"]
    assert state == "draining"
    assert new.headers["x-macfabric-node"] != "node-a"
    assert after.headers["x-macfabric-match"] == "extend"
    assert after.headers["x-macfabric-node"] != "node-a"
    assert nodes[0].calls["seal_agent"] == 3
    assert repeated.status_code in (200, 202)
    assert done_again["state"] == "drained"


async def note_departures(fabric, departures):
    """Record the agents that have left node-a, in order."""
    moved = {name for name, node in owned(fabric.nodes) if node != "node-a"}
    departures += sorted(moved - set(departures))


async def test_drain_prefers_node_with_replica():
    async with rig() as fabric:
        await fill_node(fabric, "node-a", {"alice": 500})
        for target in ("node-c", "node-b", "node-a"):  # node-b was the last owner
            if target != "node-b":
                await fabric.http().post("/v1/agents/alice/migrate", json={"to": target})
        await drain(fabric, "node-a")
        done = await drain_result(fabric, "node-a")

    assert owned(fabric.nodes) == [("alice", "node-c")]
    assert done["bytes_sent"] == 0


async def test_stuck_agents_are_shown_to_their_tenant_and_retried():
    async with rig("ab", settings=TWO_TENANTS) as fabric:
        one, two = fabric.http(KEY), fabric.http(OTHER_KEY)
        await fill_node(fabric, "node-a", {"alice": 50, "adam": 60}, http=one)
        await fill_node(fabric, "node-a", {"bella": 50}, http=two)
        refusal = ConflictError("the disk is full", code="cannot_seal")
        fabric["node-a"].behaviour.fail["seal_agent"] = refusal
        await drain(fabric, "node-a", one)
        mine = await drain_result(fabric, "node-a", one)
        others = (await node_row(fabric, "node-a", two))["drain"]
        served = await fabric.chat("word " * 50, "x", "y", agent="alice", http=one)
        fabric["node-a"].behaviour.fail.clear()
        await drain(fabric, "node-a", one)
        done = await drain_result(fabric, "node-a", one)

    assert (mine["state"], mine["agents_left"], mine["agents_moved"]) == ("stuck", 3, 0)
    assert [row["id"] for row in mine["stuck"]] == ["adam", "alice"]
    assert mine["stuck"][0] == {"id": "adam", "code": "cannot_seal", "message": "the disk is full"}
    assert mine["stuck_others"] == 1
    assert [row["id"] for row in others["stuck"]] == ["bella"]
    assert others["stuck_others"] == 2
    assert served.headers["x-macfabric-node"] == "node-a", "its owner serves it until it has moved"
    assert (done["state"], done["agents_moved"]) == ("drained", 3)


async def test_drain_without_destination_is_stuck():
    async with rig("ab") as fabric:
        await fill_node(fabric, "node-a", {"alice": 50})
        fabric["node-b"].view_changes = {"fingerprint": "e" * 64}
        await drain(fabric, "node-a")
        other_model = await drain_result(fabric, "node-a")
        fabric["node-b"].view_changes = {"free": TierBytes(10, 10)}
        await drain(fabric, "node-a")
        full = await drain_result(fabric, "node-a")

    for row in (other_model, full):
        assert (row["state"], row["stuck"][0]["code"]) == ("stuck", "no_destination")
    assert owned(fabric.nodes) == [("alice", "node-a")]


async def test_undrain_finishes_running_moves_and_keeps_other_agents():
    nodes = [FakeNode(f"node-{letter}", copy_s=0.3) for letter in "ab"]
    async with rig(nodes=nodes) as fabric:
        await fill_node(fabric, "node-a", {f"agent-{i}": 30 + i for i in range(8)})
        await drain(fabric, "node-a")
        await until(lambda: nodes[1].calls["copy_blocks"] >= 3)
        back = await drain(fabric, "node-a", verb="undrain")
        await until(lambda: fabric.services.moves.is_idle)
        moved = [agent for agent, node in owned(fabric.nodes) if node == "node-b"]
        row = await node_row(fabric, "node-a")
        again = await drain(fabric, "node-a", verb="undrain")

    assert back.json() == {"node": "node-a", "object": "node.drain", "state": "ready"}
    assert moved == ["agent-0", "agent-1", "agent-2"], "the limit of concurrent moves"
    assert (row["state"], row["drain"]) == ("ready", None)
    assert again.status_code == 200


async def test_router_resumes_drain_of_draining_node():
    async with rig("ab", tended=False) as fabric:
        await fill_node(fabric, "node-a", {"alice": 50, "bella": 70})
        fabric["node-a"].is_draining = True  # drained by a router that has ended
        await fabric.fleet.membership.refresh()
        fabric.services.drains.sweep()
        done = await drain_result(fabric, "node-a")
        fabric["node-a"].is_draining = False  # and undrained by another
        await fabric.fleet.membership.refresh()
        fabric.services.drains.sweep()

    assert (done["state"], done["agents_moved"]) == ("drained", 2)
    assert fabric.services.drains.find("node-a") is None


async def test_drain_of_unknown_or_lost_node_is_refused():
    async with rig("ab", scale=4.0) as fabric:
        await fill_node(fabric, "node-a", {"alice": 50})
        unknown = await drain(fabric, "node-z")
        await fabric["node-b"].stop()
        await until(lambda: not fabric.fleet.is_up("node-b"))
        lost = await drain(fabric, "node-b")
        lost_too = await drain(fabric, "node-b", verb="undrain")
        await drain(fabric, "node-a")
        to_draining = await fabric.http().post("/v1/agents/alice/migrate", json={"to": "node-b"})
        await fabric["node-b"].restart()
        await until(lambda: fabric.fleet.is_up("node-b"))
        fabric["node-b"].is_draining = True
        await until(lambda: all(view.name != "node-b" for view in fabric.fleet.ready()))
        refused = await fabric.http().post("/v1/agents/alice/migrate", json={"to": "node-b"})

    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "node")
    assert {lost.status_code, lost_too.status_code, to_draining.status_code} == {503}
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "node_draining")
