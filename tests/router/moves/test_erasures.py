"""An acknowledged DELETE holds: over router restarts, and for nodes that were offline."""

import asyncio

import pytest

from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until
from tests.support.clocks import ScaledClock
from tests.support.samples import sample

pytestmark = pytest.mark.anyio
TEXT = "secret " * 60
KEY = ("default", "alice")
DAY_S = 86_400.0
WALL_S = 1_700_000_000.0


def move_wall_clock(monkeypatch, seconds):
    monkeypatch.setattr(ScaledClock, "wall_s", lambda _: WALL_S + seconds)


def three_nodes():
    return [FakeNode(f"node-{letter}") for letter in "abc"]


async def start_alice(fabric, **options):
    answer = await fabric.chat(TEXT, agent="alice", **options)
    assert answer.status_code == 200
    return fabric[answer.headers["x-macfabric-node"]]


async def erase(fabric):
    return (await fabric.http().delete("/v1/agents/alice")).json()


async def agent_status(fabric):
    return (await fabric.http().get("/v1/agents/alice")).status_code


@pytest.mark.parametrize("routers", [1, 2])
async def test_returning_node_gets_tombstones_before_it_serves(routers):
    nodes = three_nodes()
    async with rig(nodes=nodes, scale=4.0) as fabric:
        holder = await start_alice(fabric)
        await holder.stop()
        await until(lambda: not fabric.fleet.is_up(holder.name))
        receipt = await erase(fabric)
        if routers == 1:
            await holder.restart()
            await until(lambda: fabric.fleet.is_up(holder.name))
            assert KEY not in holder.memory, "its lease begins after it has the tombstone"
            assert await agent_status(fabric) == 404
    assert (receipt["deleted"], receipt["unreachable"]) == (False, [holder.name])
    if routers == 1:
        return
    assert KEY in holder.memory
    # Only the nodes have tombstones. To the next router, the one without them reports first.
    for node in nodes:
        node.behaviour.slow["describe"] = 0.0 if node is holder else 0.1
    async with rig(nodes=nodes, scale=4.0) as fabric:
        await until(lambda: fabric.fleet.membership.find(holder.name).listed is not None)
        assert KEY not in holder.memory
        assert await agent_status(fabric) == 404
        metrics = (await fabric.http().get("/metrics")).text
        again = await fabric.chat(TEXT, agent="alice")

    assert "macfabric_late_erasures_total 1.0" in metrics
    assert again.headers["x-macfabric-match"] == "none"


@pytest.mark.parametrize("days", sample([-20_000, -200, 200], -20_000))
async def test_wrong_clocks_do_not_restore_erased_agent(monkeypatch, days):
    """The clock may be wrong at the erasure or at the next router's start."""
    nodes = three_nodes()
    for shifts_s in ((0.0, days * DAY_S), (days * DAY_S, 0.0)):
        at_erasure = iter(shifts_s)
        for node in nodes:
            node.memory.clear()
        move_wall_clock(monkeypatch, next(at_erasure))
        async with rig(nodes=nodes, scale=4.0) as fabric:
            holder = await start_alice(fabric)
            await holder.stop()
            await until(lambda: not fabric.fleet.is_up(holder.name))  # noqa: B023
            await erase(fabric)
        move_wall_clock(monkeypatch, next(at_erasure))
        async with rig(nodes=[n for n in nodes if n is not holder], scale=4.0) as fabric:
            tombstones = tuple(fabric.services.erasure_exchange.known)
        async with rig(nodes=nodes, scale=4.0) as fabric:
            await until(lambda: fabric.fleet.membership.find(holder.name).listed)  # noqa: B023
            assert KEY not in holder.memory
            assert await agent_status(fabric) == 404
        assert tombstones


async def test_turn_during_erasure_does_not_keep_agent():
    """The node that is about to erase must not start the agent above the erasure, with old data."""
    async with rig(nodes=three_nodes(), scale=4.0) as fabric:
        owner = await start_alice(fabric)
        first = owner.memory[KEY].epoch
        owner.behaviour.slow["erase_agent"] = 1.0
        erasing = asyncio.create_task(erase(fabric))
        await until(lambda: fabric.fleet.directory.issued_epoch(KEY) > first)
        again = await fabric.chat(TEXT, agent="alice")
        await erasing

    assert again.headers["x-macfabric-node"] != owner.name
    assert again.headers["x-macfabric-match"] == "none"
    assert KEY not in owner.memory


async def test_heartbeat_during_erasure_does_not_bypass_receipt():
    """A node that gets the tombstone before the call would remove the agent without counting it."""
    async with rig("a", scale=4.0) as fabric:
        owner = await start_alice(fabric)
        shared_count = owner.calls["share_erasures"]
        owner.behaviour.slow["erase_agent"] = 1.0
        erasing = asyncio.create_task(erase(fabric))
        await until(lambda: owner.calls["erase_agent"])
        await fabric.fleet.membership.refresh()
        assert KEY in owner.memory
        receipt = await erasing
        await fabric.fleet.membership.refresh()

    assert KEY not in owner.memory
    assert receipt["bytes_removed"] > 0
    assert owner.calls["share_erasures"] == shared_count


async def test_erasure_keeps_new_agent_of_same_name():
    nodes = three_nodes()
    async with rig(nodes=nodes, scale=4.0) as fabric:
        holder = await start_alice(fabric)
        await holder.stop()
        await until(lambda: not fabric.fleet.is_up(holder.name))
        await erase(fabric)
        successor = await start_alice(fabric)
        await holder.restart()
        await until(lambda: fabric.fleet.is_up(holder.name))
        after = await fabric.chat(TEXT, "x", "y", agent="alice")

    assert KEY not in holder.memory
    assert successor.memory[KEY].state is OwnerState.OWNED
    assert after.headers["x-macfabric-match"] == "extend"
    assert after.headers["x-macfabric-node"] == successor.name


async def test_later_router_starts_above_erased_epoch():
    """Otherwise nodes would refuse its epochs as those of old turns."""
    nodes = three_nodes()
    async with rig(nodes=nodes) as fabric:
        await start_alice(fabric)
        await erase(fabric)
    async with rig(nodes=nodes) as fabric:
        lost = await start_alice(fabric)
        await lost.stop()
        successor = await start_alice(fabric)
        floor = successor.floor(KEY)
        floors = {node.requests[-1].erased_epoch for node in (lost, successor)}
    first, second = lost.requests[-1].epoch, successor.requests[-1].epoch

    assert floor > 1_000
    assert floor < first < second
    assert floors == {floor}, "nodes without the tombstone get its epoch from the turn"


async def test_unreported_agent_is_erased_on_return():
    """While the router is new and the holder away, the agent is not reported as unknown."""
    nodes = three_nodes()
    sleeper = nodes[2]
    sleeper.memory[KEY] = Memory(*KEY, epoch=1_000_000, text=TEXT)
    async with rig(nodes=[*nodes[:2], sleeper], scale=4.0, started=False) as fabric:
        await sleeper.stop()
        await until(lambda: len(fabric.fleet.ready()) == 2 and not fabric.fleet.is_up("node-c"))
        deleted = await fabric.http().delete("/v1/agents/alice")
        await sleeper.restart()
        await until(lambda: fabric.fleet.is_up("node-c"))
        assert KEY not in sleeper.memory
        again = await fabric.http().delete("/v1/agents/alice")

    assert deleted.status_code == 200
    assert (deleted.json()["deleted"], deleted.json()["unreachable"]) == (False, ["node-c"])
    assert again.status_code == 404


async def test_expected_node_that_has_not_joined_is_unreachable():
    nodes = three_nodes()
    nodes[0].memory[KEY] = Memory(*KEY, epoch=9, text=TEXT)
    nodes[2].memory[KEY] = Memory(*KEY, epoch=8, text=TEXT)
    settings = RouterSettings(nodes_expected=3)
    async with rig(nodes=nodes, settings=settings, started=False) as fabric:
        late = fabric.listed.pop("node-c")
        await until(lambda: len(fabric.fleet.ready()) == 2)
        early = await erase(fabric)
        fabric.listed["node-c"] = late
        await until(fabric.fleet.discovery.has_all_reports)
        assert KEY not in late.memory
        await start_alice(fabric)
        whole = await erase(fabric)

    assert [part["node"] for part in early["receipts"]] == ["node-a"]
    assert (early["deleted"], early["unreachable"]) == (False, ["1 node without a known name"])
    assert (whole["deleted"], whole["unreachable"]) == (True, [])


async def test_remaining_erased_data_is_listed_as_erasing():
    nodes = three_nodes()
    async with rig(nodes=nodes, scale=4.0) as fabric:
        http, holder = fabric.http(), await start_alice(fabric)
        await holder.stop()
        await until(lambda: not fabric.fleet.is_up(holder.name))
        receipt = await erase(fabric)
        (listed,) = (await http.get("/v1/agents")).json()["data"]
        refused = await http.post("/v1/agents/alice/pin", json={"pinned": True})
        successor = await start_alice(fabric)
        (both,) = (await http.get("/v1/agents")).json()["data"]
        await holder.restart()
        await until(lambda: fabric.fleet.is_up(holder.name))
        (after,) = (await http.get("/v1/agents")).json()["data"]

    assert receipt["unreachable"] == [holder.name]
    assert (listed["state"], listed["owner"]) == ("erasing", None)
    assert listed["erasing"] == [holder.name]
    assert refused.status_code == 404
    assert (both["state"], both["owner"]) == ("owned", successor.name)
    assert both["erasing"] == [holder.name]
    assert (after["owner"], after["erasing"], after["replicas"]) == (successor.name, [], [])


async def test_duplicated_erase_call_is_not_404():
    """An agent that was listed a moment ago did exist."""
    async with rig("a") as fabric:
        holder = await start_alice(fabric)
        await fabric.fleet.membership.refresh(relist=True)
        fabric.fleet.membership._catch_up = None  # no list arrives in between
        holder.memory.clear()
        answer = await fabric.http().delete("/v1/agents/alice")

    assert answer.status_code == 200
    assert answer.json()["deleted"] is True


async def test_erasure_without_receipt_stays_pending():
    async with rig("a", scale=4.0) as fabric:
        holder = await start_alice(fabric)
        await holder.stop()
        await until(lambda: not fabric.fleet.is_up(holder.name))
        receipt = await erase(fabric)
        again = await erase(fabric)
        await holder.restart()
        await until(lambda: fabric.fleet.is_up(holder.name))
        assert KEY not in holder.memory
        assert await agent_status(fabric) == 404

    assert receipt["unreachable"] == again["unreachable"] == ["node-a"]
    assert receipt["deleted"] is again["deleted"] is False


async def test_erasure_of_unknown_name_is_remembered():
    """A Mac that is on no list today may have the agent, and return."""
    stray = FakeNode("node-c")
    stray.memory[KEY] = Memory(*KEY, epoch=9, text=TEXT)
    async with rig("ab") as fabric:
        answer = await fabric.http().delete("/v1/agents/alice")
        assert [len(node.erased) for node in fabric.nodes.values()] == [1, 1]
    nodes = [*fabric.nodes.values(), stray]
    async with rig(nodes=nodes, scale=4.0, started=False) as fabric:
        await until(lambda: len(fabric.fleet.ready()) == 3)

    assert answer.status_code == 404
    assert KEY not in stray.memory
