"""An acknowledged DELETE stays true: over router restarts, and for nodes that were away."""

import pytest

from fabric.manifest import OwnerState
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
TEXT = "secret " * 60
KEY = ("default", "alice")


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
async def test_a_node_that_was_away_is_told_before_it_serves(routers):
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


async def test_a_new_agent_of_that_name_is_spared():
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


async def test_a_router_that_starts_later_begins_above_an_erased_agent():
    """Else it would give out epochs that nodes refuse, as those of turns sent long ago."""
    nodes = three()
    async with rig(nodes=nodes) as made:
        await told(made)
        await erase(made)
    async with rig(nodes=nodes) as made:
        lost = await told(made)
        await lost.stop()
        anew = await told(made)
        floor = anew.floor(KEY)
    first, second = lost.requests[-1].epoch, anew.requests[-1].epoch

    assert floor > 1_000
    assert floor < first < second


async def test_a_replica_that_this_router_never_heard_of_goes_too():
    """The router is new, the holder away: whoever deletes gets what can be known, 404."""
    nodes = three()
    sleeper = nodes[2]
    sleeper.memory[KEY] = Memory(*KEY, epoch=7, text=TEXT)
    async with rig(nodes=[*nodes[:2], sleeper], scale=4.0, started=False) as made:
        await sleeper.stop()
        await until(lambda: len(made.fleet.ready()) == 2 and not made.fleet.is_up("node-c"))
        deleted = await made.http().delete("/v1/agents/alice")
        await sleeper.restart()
        await until(lambda: made.fleet.is_up("node-c"))
        assert KEY not in sleeper.memory

    assert deleted.status_code == 404


async def test_an_erasure_that_nobody_could_note_is_owed_and_said_so():
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


async def test_a_name_that_nobody_knows_leaves_nothing_behind():
    async with rig("ab") as made:
        answers = [
            (await made.http().delete(f"/v1/agents/nobody-{i}")).status_code for i in range(5)
        ]

    assert answers == [404] * 5
    assert [len(node.erased) for node in made.nodes.values()] == [0, 0]
