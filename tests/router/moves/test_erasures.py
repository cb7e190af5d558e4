"""An acknowledged DELETE stays true: over router restarts, and for nodes that were away."""

import asyncio

import pytest

from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from tests.router.fake_memory import Memory, ScaledClock
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until
from tests.support.samples import sample

pytestmark = pytest.mark.anyio
TEXT = "secret " * 60
KEY = ("default", "alice")
DAY_S = 86_400.0
WALL_S = 1_700_000_000.0


def shift(monkeypatch, seconds):
    monkeypatch.setattr(ScaledClock, "wall_s", lambda _: WALL_S + seconds)


def three():
    return [FakeNode(f"node-{letter}") for letter in "abc"]


async def told(made, **options):
    answer = await made.chat(TEXT, agent="alice", **options)
    assert answer.status_code == 200
    return made[answer.headers["x-macfabric-node"]]


async def erase(made):
    return (await made.http().delete("/v1/agents/alice")).json()


async def shown(made):
    return (await made.http().get("/v1/agents/alice")).status_code


@pytest.mark.parametrize("routers", [1, 2])
async def test_a_returning_node_gets_tombstones_before_it_serves(routers):
    nodes = three()
    async with rig(nodes=nodes, scale=4.0) as made:
        holder = await told(made)
        await holder.stop()
        await until(lambda: not made.fleet.is_up(holder.name))
        receipt = await erase(made)
        if routers == 1:
            await holder.restart()
            await until(lambda: made.fleet.is_up(holder.name))
            assert KEY not in holder.memory, "its lease begins after it was told"
            assert await shown(made) == 404
    assert (receipt["deleted"], receipt["unreachable"]) == (False, [holder.name])
    if routers == 1:
        return
    assert KEY in holder.memory
    # Nobody but the nodes remembers. The one that slept is the first that the next router hears.
    for node in nodes:
        node.does.slow["describe"] = 0.0 if node is holder else 0.1
    async with rig(nodes=nodes, scale=4.0) as made:
        await until(lambda: made.fleet.membership.find(holder.name).listed is not None)
        assert KEY not in holder.memory
        assert await shown(made) == 404
        metrics = (await made.http().get("/metrics")).text
        again = await made.chat(TEXT, agent="alice")

    assert "macfabric_late_erasures_total 1.0" in metrics
    assert again.headers["x-macfabric-match"] == "none"


@pytest.mark.parametrize("days", sample([-20_000, -200, 200], -20_000))
async def test_wrong_clocks_do_not_bring_an_erased_agent_back(monkeypatch, days):
    """Neither a wrong clock at the erasure nor one at the next router's start."""
    nodes = three()
    for shifts_s in ((0.0, days * DAY_S), (days * DAY_S, 0.0)):
        at_erasure = iter(shifts_s)
        for node in nodes:
            node.memory.clear()
        shift(monkeypatch, next(at_erasure))
        async with rig(nodes=nodes, scale=4.0) as made:
            holder = await told(made)
            await holder.stop()
            await until(lambda: not made.fleet.is_up(holder.name))  # noqa: B023
            await erase(made)
        shift(monkeypatch, next(at_erasure))
        async with rig(nodes=[n for n in nodes if n is not holder], scale=4.0) as made:
            known = tuple(made.services.erasure_exchange.known)
        async with rig(nodes=nodes, scale=4.0) as made:
            await until(lambda: made.fleet.membership.find(holder.name).listed)  # noqa: B023
            assert KEY not in holder.memory
            assert await shown(made) == 404
        assert known


async def test_a_turn_during_an_erasure_does_not_keep_the_agent():
    """The node that is about to erase must not start the agent above the erasure, with old data."""
    async with rig(nodes=three(), scale=4.0) as made:
        owner = await told(made)
        first = owner.memory[KEY].epoch
        owner.does.slow["erase_agent"] = 1.0
        erasing = asyncio.create_task(erase(made))
        await until(lambda: made.fleet.directory.issued(KEY) > first)
        again = await made.chat(TEXT, agent="alice")
        await erasing

    assert again.headers["x-macfabric-node"] != owner.name
    assert again.headers["x-macfabric-match"] == "none"
    assert KEY not in owner.memory


async def test_a_heartbeat_does_not_remove_what_the_receipt_counts():
    """A node that gets the tombstone before the call would remove the agent without counting it."""
    async with rig("a", scale=4.0) as made:
        owner = await told(made)
        shared_count = owner.calls["share_erasures"]
        owner.does.slow["erase_agent"] = 1.0
        erasing = asyncio.create_task(erase(made))
        await until(lambda: owner.calls["erase_agent"])
        await made.fleet.membership.refresh()
        assert KEY in owner.memory
        receipt = await erasing
        await made.fleet.membership.refresh()

    assert KEY not in owner.memory
    assert receipt["bytes_removed"] > 0
    assert owner.calls["share_erasures"] == shared_count


async def test_an_erasure_spares_a_new_agent_of_the_name():
    nodes = three()
    async with rig(nodes=nodes, scale=4.0) as made:
        holder = await told(made)
        await holder.stop()
        await until(lambda: not made.fleet.is_up(holder.name))
        await erase(made)
        anew = await told(made)
        await holder.restart()
        await until(lambda: made.fleet.is_up(holder.name))
        after = await made.chat(TEXT, "x", "y", agent="alice")

    assert KEY not in holder.memory
    assert anew.memory[KEY].state is OwnerState.OWNED
    assert after.headers["x-macfabric-match"] == "extend"
    assert after.headers["x-macfabric-node"] == anew.name


async def test_a_later_router_starts_above_an_erased_agent():
    """Otherwise nodes would refuse its epochs as those of old turns."""
    nodes = three()
    async with rig(nodes=nodes) as made:
        await told(made)
        await erase(made)
    async with rig(nodes=nodes) as made:
        lost = await told(made)
        await lost.stop()
        anew = await told(made)
        floor = anew.floor(KEY)
        floors = {node.requests[-1].erased_epoch for node in (lost, anew)}
    first, second = lost.requests[-1].epoch, anew.requests[-1].epoch

    assert floor > 1_000
    assert floor < first < second
    assert floors == {floor}, "a node that has not heard of it does not begin above it"


async def test_an_unreported_replica_is_erased_too():
    """While the router is new and the holder away, the agent is not reported as unknown."""
    nodes = three()
    sleeper = nodes[2]
    sleeper.memory[KEY] = Memory(*KEY, epoch=1_000_000, text=TEXT)
    async with rig(nodes=[*nodes[:2], sleeper], scale=4.0, started=False) as made:
        await sleeper.stop()
        await until(lambda: len(made.fleet.ready()) == 2 and not made.fleet.is_up("node-c"))
        deleted = await made.http().delete("/v1/agents/alice")
        await sleeper.restart()
        await until(lambda: made.fleet.is_up("node-c"))
        assert KEY not in sleeper.memory
        again = await made.http().delete("/v1/agents/alice")

    assert deleted.status_code == 200
    assert (deleted.json()["deleted"], deleted.json()["unreachable"]) == (False, ["node-c"])
    assert again.status_code == 404


async def test_an_expected_node_that_has_not_joined_is_unreachable():
    nodes = three()
    nodes[0].memory[KEY] = Memory(*KEY, epoch=9, text=TEXT)
    nodes[2].memory[KEY] = Memory(*KEY, epoch=8, text=TEXT)
    settings = RouterSettings(nodes_expected=3)
    async with rig(nodes=nodes, settings=settings, started=False) as made:
        late = made.listed.pop("node-c")
        await until(lambda: len(made.fleet.ready()) == 2)
        early = await erase(made)
        made.listed["node-c"] = late
        await until(made.fleet.discovery.has_all_reports)
        assert KEY not in late.memory
        await told(made)
        whole = await erase(made)

    assert [part["node"] for part in early["receipts"]] == ["node-a"]
    assert (early["deleted"], early["unreachable"]) == (False, ["1 node without a known name"])
    assert (whole["deleted"], whole["unreachable"]) == (True, [])


async def test_erased_data_that_remains_is_listed_as_erasing():
    nodes = three()
    async with rig(nodes=nodes, scale=4.0) as made:
        http, holder = made.http(), await told(made)
        await holder.stop()
        await until(lambda: not made.fleet.is_up(holder.name))
        receipt = await erase(made)
        (listed,) = (await http.get("/v1/agents")).json()["data"]
        refused = await http.post("/v1/agents/alice/pin", json={"pinned": True})
        anew = await told(made)
        (both,) = (await http.get("/v1/agents")).json()["data"]
        await holder.restart()
        await until(lambda: made.fleet.is_up(holder.name))
        (after,) = (await http.get("/v1/agents")).json()["data"]

    assert receipt["unreachable"] == [holder.name]
    assert (listed["state"], listed["owner"]) == ("erasing", None)
    assert listed["erasing"] == [holder.name]
    assert refused.status_code == 404
    assert (both["state"], both["owner"]) == ("owned", anew.name)
    assert both["erasing"] == [holder.name]
    assert (after["owner"], after["erasing"], after["replicas"]) == (anew.name, [], [])


async def test_a_doubled_call_whose_second_copy_answers_makes_no_404():
    """An agent that was listed a moment ago did exist."""
    async with rig("a") as made:
        holder = await told(made)
        await made.fleet.membership.refresh(relist=True)
        made.fleet.membership._catch_up = None  # no list comes in between
        holder.memory.clear()
        answer = await made.http().delete("/v1/agents/alice")

    assert answer.status_code == 200
    assert answer.json()["deleted"] is True


async def test_an_erasure_without_a_receipt_is_pending():
    async with rig("a", scale=4.0) as made:
        holder = await told(made)
        await holder.stop()
        await until(lambda: not made.fleet.is_up(holder.name))
        receipt = await erase(made)
        again = await erase(made)
        await holder.restart()
        await until(lambda: made.fleet.is_up(holder.name))
        assert KEY not in holder.memory
        assert await shown(made) == 404

    assert receipt["unreachable"] == again["unreachable"] == ["node-a"]
    assert receipt["deleted"] is again["deleted"] is False


async def test_the_erasure_of_an_unknown_name_is_remembered():
    """A Mac that is on no list today may have it, and return."""
    stray = FakeNode("node-c")
    stray.memory[KEY] = Memory(*KEY, epoch=9, text=TEXT)
    async with rig("ab") as made:
        answer = await made.http().delete("/v1/agents/alice")
        assert [len(node.erased) for node in made.nodes.values()] == [1, 1]
    nodes = [*made.nodes.values(), stray]
    async with rig(nodes=nodes, scale=4.0, started=False) as made:
        await until(lambda: len(made.fleet.ready()) == 3)

    assert answer.status_code == 404
    assert KEY not in stray.memory
