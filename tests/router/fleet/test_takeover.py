import asyncio
import json

import pytest

from fabric.errors import RetryLaterError
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from router.fleet.membership import LeaseState
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import SOON, rig, until

pytestmark = pytest.mark.anyio
LONG = "word " * 1000
PATIENT = RouterSettings(takeover_after_s=3.0)


def node_of(answer):
    return answer.headers["x-macfabric-node"]


async def test_a_lost_owner_is_waited_for_and_answers_with_its_memory():
    async with rig(settings=PATIENT) as made:
        first = await made.chat(LONG, agent="alice")
        owner = made[node_of(first)]
        await owner.stop()
        asking = asyncio.create_task(made.chat(LONG, "x", "y", agent="alice"))
        await asyncio.sleep(0.3)
        await owner.restart()
        second = await asking

    assert node_of(second) == owner.name
    assert second.headers["x-macfabric-cache"] == "disk"
    assert second.headers["x-macfabric-epoch"] == "1"


async def test_a_restarting_owner_is_waited_for_as_long_as_a_prefill():
    # 4,000 characters a second are 1,000 tokens a second: this prompt takes over two.
    long = "word " * 2000
    async with rig(settings=SOON) as made:
        first = await made.chat(long, agent="alice")
        owner = made[node_of(first)]
        await owner.stop()
        owner.is_loading = True
        asking = asyncio.create_task(made.chat(long, "x", "y", agent="alice"))
        brief = asyncio.create_task(made.chat("hello", agent="bob"))
        await asyncio.sleep(1.2)
        assert not asking.done(), "takeover_after_s is over since long"
        owner.is_loading = False
        await owner.restart()
        second = await asking

    assert (await brief).status_code == 200
    assert node_of(second) == owner.name
    assert second.headers["x-macfabric-cache"] == "disk"


async def test_a_lost_owner_is_succeeded_at_the_next_epoch():
    async with rig(settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        await made[node_of(first)].stop()
        started_s = asyncio.get_running_loop().time()
        second = await made.chat(LONG, "x", "y", agent="alice")
        waited_s = asyncio.get_running_loop().time() - started_s
        third = await made.chat(LONG, "x", "y", "z", "w", agent="alice")

    assert second.status_code == 200
    assert node_of(second) != node_of(first)
    assert second.headers["x-macfabric-epoch"] == "2"
    assert 0.3 <= waited_s < 10
    assert node_of(third) == node_of(second)
    assert third.headers["x-macfabric-match"] == "extend"


async def test_simultaneous_turns_agree_on_the_successor():
    async with rig(names="abcd", settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        await made[node_of(first)].stop()
        answers = await asyncio.gather(
            *(made.chat(LONG, "x", str(i), agent="alice") for i in range(6))
        )

    assert {a.status_code for a in answers} == {200}
    assert len({node_of(a) for a in answers}) == 1
    assert {a.headers["x-macfabric-epoch"] for a in answers} == {"2"}


async def test_a_successor_with_a_replica_continues_from_it():
    async with rig(settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        source = node_of(first)
        target = "node-b" if source != "node-b" else "node-c"
        moved = await made.http().post("/v1/agents/alice/migrate", json={"to": target})
        await made[target].stop()
        second = await made.chat(LONG, "x", "y", agent="alice")

    assert moved.status_code == 200
    assert node_of(second) == source, "it still holds a copy"
    assert second.headers["x-macfabric-epoch"] == "3"
    assert int(second.headers["x-macfabric-cached-tokens"]) >= len(LONG)


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_small_replica_counts_on_a_draining_node_too(is_draining):
    said = ["word " * 20] * 7  # at 500 tokens a second half a second anew, with the copy a tenth
    async with rig("abc", settings=SOON, tended=False) as made:
        first = await made.chat(*said, agent="alice")
        source = made[node_of(first)]
        target = made["node-b" if source.name != "node-b" else "node-c"]
        await made.http().post("/v1/agents/alice/migrate", json={"to": target.name})
        for node in made.nodes.values():
            node.view_changes = {"prefill_tokens_per_s": 1e6}
        source.view_changes = {"prefill_tokens_per_s": 500.0}
        source.is_draining = is_draining
        await made.fleet.membership.refresh(relist=True)
        await target.stop()
        second = await made.chat(*said, "x", "y", agent="alice", max_tokens=1)
        new = await made.chat(*said, agent="new", max_tokens=1)

    assert node_of(second) == source.name
    assert second.headers["x-macfabric-match"] == "extend"
    assert node_of(new) != source.name


async def test_a_returning_owner_gives_way_to_its_successor():
    async with rig(settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        old = made[node_of(first)]
        await old.stop()
        second = await made.chat(LONG, "x", "y", agent="alice")
        await old.restart()
        await until(lambda: old.memory["default", "alice"].state is OwnerState.REPLICA)
        third = await made.chat(LONG, "x", "y", agent="alice")

    assert old.memory["default", "alice"].epoch == 2
    assert node_of(third) == node_of(second)


async def test_a_hung_owner_is_given_up_when_its_lease_expires():
    async with rig(scale=4.0, settings=RouterSettings(takeover_after_s=2.0)) as made:
        first = await made.chat(LONG, agent="alice")
        made[node_of(first)].does.hang = True
        second = await made.chat(LONG, "x", "y", agent="alice")
        nodes = (await made.http().get("/v1/nodes")).json()["data"]

    assert second.status_code == 200
    assert node_of(second) != node_of(first)
    states = {node["name"]: node["state"] for node in nodes}
    assert states[node_of(first)] == "expired"


async def test_a_node_that_hangs_during_an_answer_ends_the_stream_with_an_error():
    async with rig(scale=4.0, settings=SOON) as made:
        for node in made.nodes.values():
            node.does.delay_s = 0.02
        asking = asyncio.create_task(made.chat(LONG, stream=True))
        await until(lambda: any(node.running for node in made.nodes.values()))
        node = next(node for node in made.nodes.values() if node.running)
        node.does.delay_s, node.does.hang = 3600.0, True
        answer = await asking

    last = json.loads(answer.text.strip().split("\n\n")[-1][6:])
    assert last["error"]["code"] == "node_lost"
    assert "[DONE]" not in answer.text


async def test_loss_is_noticed_without_waiting_for_the_next_beat():
    async with rig("ab", settings=SOON) as made:
        first = await made.chat("hi", agent="alice")
        await made[node_of(first)].stop()
        await made.chat("hi", agent="alice")
        health = made.fleet.membership.health(node_of(first))

    assert health is not LeaseState.EXPIRED, "taken over by the turn, not by the lease"


async def test_a_stream_that_outlives_its_nodes_lease_is_not_acknowledged():
    """Control calls and tokens use different connections; only one of them may be cut."""
    async with rig(scale=4.0, settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        old = made[node_of(first)]
        old.does.delay_s = 0.02
        # Tokens for longer than anything here takes on a busy machine.
        slow = asyncio.create_task(made.chat("late " * 5000, agent="alice", max_tokens=5000))
        await until(lambda: old.running)
        old.does.deaf.add("describe")
        await until(lambda: not made.fleet.is_up(old.name))
        second = await made.chat(LONG, "x", "y", agent="alice")
        assert not slow.done(), "its tokens still come"
        old.does.delay_s = 0.0
        late = await slow
        metrics = (await made.http().get("/metrics")).text
        old.does.deaf.clear()
        await until(lambda: old.memory["default", "alice"].state is OwnerState.REPLICA)
        third = await made.chat(LONG, "x", "y", agent="alice")
        healed = (await made.http().get("/metrics")).text

    assert node_of(second) == node_of(third) != old.name
    assert second.headers["x-macfabric-epoch"] == third.headers["x-macfabric-epoch"] == "2"
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "fenced"
    for line in ("fenced_turns_total", "takeovers_total", "expired_leases"):
        assert f"macfabric_{line} 1.0" in metrics
    assert 'macfabric_recovered_agents_total{how="gave_way"} 1.0' in healed


class Held(FakeNode):
    """A node that delays its admissions."""

    def __init__(self, name):
        super().__init__(name)
        self.taken, self.may_tell = asyncio.Event(), asyncio.Event()

    async def _stream(self, *taken):
        self.taken.set()
        await self.may_tell.wait()
        return await super()._stream(*taken)


async def test_a_turn_of_an_older_owner_is_fenced_once_the_newer_reports():
    """The older owner reports to a new router first, and gets a turn."""
    key = ("default", "alice")
    old, newer = Held("node-a"), FakeNode("node-b")
    old.memory[key] = Memory(*key, epoch=1)
    old.does.deaf.add("release_agent")  # the router alone stands in its way
    async with rig(nodes=[old, newer], settings=PATIENT) as made:
        late = asyncio.create_task(made.chat(LONG, agent="alice"))
        await old.taken.wait()
        newer.memory[key] = Memory(*key, epoch=7)  # it was away
        newer.changes += 1
        await until(lambda: made.fleet.directory.owner(key).node == newer.name)
        old.may_tell.set()
        refused = await late
        again = await made.chat(LONG, agent="alice")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "fenced")
    assert node_of(again) == newer.name
    assert again.headers["x-macfabric-epoch"] == "7"


async def test_no_epoch_is_given_out_twice():
    """The first successor hangs, and may still take the agent when it wakes."""
    async with rig("abc", scale=4.0, settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        old = made[node_of(first)]
        await old.stop()
        others = [node for node in made.nodes.values() if node is not old]
        for node in others:
            node.does.first_delay_s = 2.5
        asking = asyncio.create_task(made.chat(LONG, "x", "y", agent="alice"))
        await until(lambda: any(node.requests for node in others))
        slow = next(node for node in others if node.requests)
        slow.does.deaf.add("describe")
        other = next(node for node in others if node is not slow)
        other.does.first_delay_s = 0.0
        second = await asking

    assert node_of(second) == other.name
    assert slow.requests[0].epoch == 2
    assert other.requests[0].epoch == 3
    assert second.headers["x-macfabric-epoch"] == "3"


async def test_an_owner_that_returns_is_asked_above_a_successor_that_never_served():
    """The successor may still claim its epoch, so no turn below it is acknowledged."""
    async with rig(names="ab", settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        old = made[node_of(first)]
        successor = next(node for node in made.nodes.values() if node is not old)
        successor.does.refuse = RetryLaterError("its disk is full")
        await old.stop()
        refused = await made.chat(LONG, "x", "y", agent="alice")
        await old.restart()
        returned = made.fleet.membership.find(old.name)
        await until(lambda: returned.view.incarnation == old.incarnation)
        second = await made.chat(LONG, "x", "y", agent="alice")
        third = await made.chat(LONG, "x", "y", "z", "w", agent="alice")

    assert refused.status_code == 503
    assert successor.requests[0].epoch == 2
    assert (second.status_code, third.status_code) == (200, 200)
    assert node_of(second) == node_of(third) == old.name
    assert second.headers["x-macfabric-cache"] == "disk", "it goes on with its memory"
    assert second.headers["x-macfabric-epoch"] == third.headers["x-macfabric-epoch"] == "3"


async def test_an_idle_agent_whose_successor_never_served_moves_above_it():
    async with rig(settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        old = made[node_of(first)]
        target = next(node for node in made.nodes.values() if node is not old)
        made.fleet.directory.issue(("default", "alice"), 7)
        moved = await made.http().post("/v1/agents/alice/migrate", json={"to": target.name})
        second = await made.chat(LONG, "x", "y", agent="alice")

    assert (moved.status_code, moved.json()["epoch"]) == (200, 8)
    assert node_of(second) == target.name
    assert second.headers["x-macfabric-epoch"] == "8"


async def test_an_agent_that_another_node_takes_over_does_not_move():
    async with rig(settings=SOON) as made:
        first = await made.chat(LONG, agent="alice")
        old, key = made[node_of(first)], ("default", "alice")
        target = next(node for node in made.nodes.values() if node is not old)
        made.fleet.directory.reserve(key, target.name, 2)  # as a turn does that is on its way
        moved = await made.http().post("/v1/agents/alice/migrate", json={"to": target.name})

    assert moved.status_code == 503
    assert old.memory[key].state is OwnerState.OWNED
    assert key not in target.memory


async def test_a_conversation_found_below_the_last_epoch_is_asked_by_name_above_it():
    async with rig(names="ab", settings=SOON) as made:
        first = await made.chat(LONG)
        agent = first.headers["x-macfabric-agent"]
        made.fleet.directory.issue(("default", agent), 7)
        second = await made.chat(LONG, "x", "y")
        left = made.fleet.ledger.turns(node_of(second))

    assert second.status_code == 200
    assert second.headers["x-macfabric-agent"] == agent
    assert second.headers["x-macfabric-epoch"] == "8"
    assert left == 0
    assert made[node_of(second)].running == 0
