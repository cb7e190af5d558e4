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


async def test_turn_waits_for_lost_owner_and_uses_its_cache():
    async with rig(settings=PATIENT) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        owner = fabric[node_of(first)]
        await owner.stop()
        asking = asyncio.create_task(fabric.chat(LONG, "x", "y", agent="alice"))
        await asyncio.sleep(0.3)
        await owner.restart()
        second = await asking

    assert node_of(second) == owner.name
    assert second.headers["x-macfabric-cache"] == "disk"
    assert second.headers["x-macfabric-epoch"] == "1"


async def test_turn_waits_for_restarting_owner_up_to_prefill_time():
    # 4,000 characters a second are 1,000 tokens a second: this prompt takes over two.
    long = "word " * 2000
    async with rig(settings=SOON) as fabric:
        first = await fabric.chat(long, agent="alice")
        owner = fabric[node_of(first)]
        await owner.stop()
        owner.is_loading = True
        asking = asyncio.create_task(fabric.chat(long, "x", "y", agent="alice"))
        brief = asyncio.create_task(fabric.chat("hello", agent="bob"))
        await asyncio.sleep(1.2)
        assert not asking.done(), "takeover_after_s has long passed"
        owner.is_loading = False
        await owner.restart()
        second = await asking

    assert (await brief).status_code == 200
    assert node_of(second) == owner.name
    assert second.headers["x-macfabric-cache"] == "disk"


async def test_lost_owner_is_replaced_at_next_epoch():
    async with rig(settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        await fabric[node_of(first)].stop()
        started_s = asyncio.get_running_loop().time()
        second = await fabric.chat(LONG, "x", "y", agent="alice")
        waited_s = asyncio.get_running_loop().time() - started_s
        third = await fabric.chat(LONG, "x", "y", "z", "w", agent="alice")

    assert second.status_code == 200
    assert node_of(second) != node_of(first)
    assert second.headers["x-macfabric-epoch"] == "2"
    assert 0.3 <= waited_s < 10
    assert node_of(third) == node_of(second)
    assert third.headers["x-macfabric-match"] == "extend"


async def test_simultaneous_turns_agree_on_successor():
    async with rig(names="abcd", settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        await fabric[node_of(first)].stop()
        answers = await asyncio.gather(
            *(fabric.chat(LONG, "x", str(i), agent="alice") for i in range(6))
        )

    assert {a.status_code for a in answers} == {200}
    assert len({node_of(a) for a in answers}) == 1
    assert {a.headers["x-macfabric-epoch"] for a in answers} == {"2"}


async def test_replica_holder_takes_over_with_its_copy():
    async with rig(settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        source = node_of(first)
        target = "node-b" if source != "node-b" else "node-c"
        moved = await fabric.http().post("/v1/agents/alice/migrate", json={"to": target})
        await fabric[target].stop()
        second = await fabric.chat(LONG, "x", "y", agent="alice")

    assert moved.status_code == 200
    assert node_of(second) == source, "the source still holds a copy"
    assert second.headers["x-macfabric-epoch"] == "3"
    assert int(second.headers["x-macfabric-cached-tokens"]) >= len(LONG)


@pytest.mark.parametrize("is_draining", [False, True])
async def test_draining_node_with_small_replica_takes_over(is_draining):
    prompts = ["word " * 20] * 7  # at 500 tokens/s, half a second of prefill; a tenth with the copy
    async with rig("abc", settings=SOON, tended=False) as fabric:
        first = await fabric.chat(*prompts, agent="alice")
        source = fabric[node_of(first)]
        target = fabric["node-b" if source.name != "node-b" else "node-c"]
        await fabric.http().post("/v1/agents/alice/migrate", json={"to": target.name})
        for node in fabric.nodes.values():
            node.view_changes = {"prefill_tokens_per_s": 1e6}
        source.view_changes = {"prefill_tokens_per_s": 500.0}
        source.is_draining = is_draining
        await fabric.fleet.membership.refresh(relist=True)
        await target.stop()
        second = await fabric.chat(*prompts, "x", "y", agent="alice", max_tokens=1)
        new = await fabric.chat(*prompts, agent="new", max_tokens=1)

    assert node_of(second) == source.name
    assert second.headers["x-macfabric-match"] == "extend"
    assert node_of(new) != source.name


async def test_returning_owner_yields_to_successor():
    async with rig(settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        old = fabric[node_of(first)]
        await old.stop()
        second = await fabric.chat(LONG, "x", "y", agent="alice")
        await old.restart()
        await until(lambda: old.memory["default", "alice"].state is OwnerState.REPLICA)
        third = await fabric.chat(LONG, "x", "y", agent="alice")

    assert old.memory["default", "alice"].epoch == 2
    assert node_of(third) == node_of(second)


async def test_hung_owner_is_replaced_when_lease_expires():
    async with rig(scale=4.0, settings=RouterSettings(takeover_after_s=2.0)) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        fabric[node_of(first)].behaviour.hang = True
        second = await fabric.chat(LONG, "x", "y", agent="alice")
        nodes = (await fabric.http().get("/v1/nodes")).json()["data"]

    assert second.status_code == 200
    assert node_of(second) != node_of(first)
    states = {node["name"]: node["state"] for node in nodes}
    assert states[node_of(first)] == "expired"


async def test_stream_ends_with_error_when_node_hangs():
    async with rig(scale=4.0, settings=SOON) as fabric:
        for node in fabric.nodes.values():
            node.behaviour.delay_s = 0.02
        asking = asyncio.create_task(fabric.chat(LONG, stream=True))
        await until(lambda: any(node.running for node in fabric.nodes.values()))
        node = next(node for node in fabric.nodes.values() if node.running)
        node.behaviour.delay_s, node.behaviour.hang = 3600.0, True
        answer = await asking

    last = json.loads(answer.text.strip().split("\n\n")[-1][6:])
    assert last["error"]["code"] == "node_lost"
    assert "[DONE]" not in answer.text


async def test_lost_node_is_noticed_before_next_heartbeat():
    async with rig("ab", settings=SOON) as fabric:
        first = await fabric.chat("hi", agent="alice")
        await fabric[node_of(first)].stop()
        await fabric.chat("hi", agent="alice")
        health = fabric.fleet.membership.health(node_of(first))

    assert health is not LeaseState.EXPIRED, "taken over by the turn, not by the lease"


async def test_stream_outliving_its_lease_is_fenced():
    """Control calls and tokens use different connections; only one of them may be cut."""
    async with rig(scale=4.0, settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        old = fabric[node_of(first)]
        old.behaviour.delay_s = 0.02
        # Stream longer than all other steps take on a busy machine.
        slow = asyncio.create_task(fabric.chat("late " * 5000, agent="alice", max_tokens=5000))
        await until(lambda: old.running)
        old.behaviour.dropped_calls.add("describe")
        await until(lambda: not fabric.fleet.is_up(old.name))
        second = await fabric.chat(LONG, "x", "y", agent="alice")
        assert not slow.done(), "its tokens still arrive"
        old.behaviour.delay_s = 0.0
        late = await slow
        metrics = (await fabric.http().get("/metrics")).text
        old.behaviour.dropped_calls.clear()
        await until(lambda: old.memory["default", "alice"].state is OwnerState.REPLICA)
        third = await fabric.chat(LONG, "x", "y", agent="alice")
        healed = (await fabric.http().get("/metrics")).text

    assert node_of(second) == node_of(third) != old.name
    assert second.headers["x-macfabric-epoch"] == third.headers["x-macfabric-epoch"] == "2"
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "fenced"
    for line in ("fenced_turns_total", "takeovers_total", "expired_leases_total"):
        assert f"macfabric_{line} 1.0" in metrics
    assert 'macfabric_recovered_agents_total{how="gave_way"} 1.0' in healed


class DelayedNode(FakeNode):
    """A node that delays its admissions."""

    def __init__(self, name):
        super().__init__(name)
        self.has_turn, self.may_answer = asyncio.Event(), asyncio.Event()

    async def _stream(self, *arguments):
        self.has_turn.set()
        await self.may_answer.wait()
        return await super()._stream(*arguments)


async def test_turn_of_older_owner_is_fenced_when_newer_owner_reports():
    """The older owner reports to a new router first, and gets a turn."""
    key = ("default", "alice")
    old, newer = DelayedNode("node-a"), FakeNode("node-b")
    old.memory[key] = Memory(*key, epoch=1)
    old.behaviour.dropped_calls.add("release_agent")  # only the router can fence its turn
    async with rig(nodes=[old, newer], settings=PATIENT) as fabric:
        late = asyncio.create_task(fabric.chat(LONG, agent="alice"))
        await old.has_turn.wait()
        newer.memory[key] = Memory(*key, epoch=7)  # it was offline
        newer.changes += 1
        await until(lambda: fabric.fleet.directory.owner(key).node == newer.name)
        old.may_answer.set()
        refused = await late
        again = await fabric.chat(LONG, agent="alice")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "fenced")
    assert node_of(again) == newer.name
    assert again.headers["x-macfabric-epoch"] == "7"


async def test_epoch_is_never_issued_twice():
    """The first successor hangs, and may still claim the agent when it wakes."""
    async with rig("abc", scale=4.0, settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        old = fabric[node_of(first)]
        await old.stop()
        others = [node for node in fabric.nodes.values() if node is not old]
        for node in others:
            node.behaviour.first_delay_s = 2.5
        asking = asyncio.create_task(fabric.chat(LONG, "x", "y", agent="alice"))
        await until(lambda: any(node.requests for node in others))
        slow = next(node for node in others if node.requests)
        slow.behaviour.dropped_calls.add("describe")
        other = next(node for node in others if node is not slow)
        other.behaviour.first_delay_s = 0.0
        second = await asking

    assert node_of(second) == other.name
    assert slow.requests[0].epoch == 2
    assert other.requests[0].epoch == 3
    assert second.headers["x-macfabric-epoch"] == "3"


async def test_returning_owner_gets_epoch_above_unserved_successor():
    """The successor may still claim its epoch, so no turn below it is acknowledged."""
    async with rig(names="ab", settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        old = fabric[node_of(first)]
        successor = next(node for node in fabric.nodes.values() if node is not old)
        successor.behaviour.refuse = RetryLaterError("its disk is full")
        await old.stop()
        refused = await fabric.chat(LONG, "x", "y", agent="alice")
        await old.restart()
        returned = fabric.fleet.membership.find(old.name)
        await until(lambda: returned.view.incarnation == old.incarnation)
        second = await fabric.chat(LONG, "x", "y", agent="alice")
        third = await fabric.chat(LONG, "x", "y", "z", "w", agent="alice")

    assert refused.status_code == 503
    assert successor.requests[0].epoch == 2
    assert (second.status_code, third.status_code) == (200, 200)
    assert node_of(second) == node_of(third) == old.name
    assert second.headers["x-macfabric-cache"] == "disk", "the old owner kept its cache"
    assert second.headers["x-macfabric-epoch"] == third.headers["x-macfabric-epoch"] == "3"


async def test_migration_epoch_is_above_unserved_successor():
    async with rig(settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        old = fabric[node_of(first)]
        target = next(node for node in fabric.nodes.values() if node is not old)
        fabric.fleet.directory.issue(("default", "alice"), 7)
        moved = await fabric.http().post("/v1/agents/alice/migrate", json={"to": target.name})
        second = await fabric.chat(LONG, "x", "y", agent="alice")

    assert (moved.status_code, moved.json()["epoch"]) == (200, 8)
    assert node_of(second) == target.name
    assert second.headers["x-macfabric-epoch"] == "8"


async def test_migration_is_refused_during_takeover():
    async with rig(settings=SOON) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        old, key = fabric[node_of(first)], ("default", "alice")
        target = next(node for node in fabric.nodes.values() if node is not old)
        fabric.fleet.directory.reserve(key, target.name, 2)  # as a turn does that is on its way
        moved = await fabric.http().post("/v1/agents/alice/migrate", json={"to": target.name})

    assert moved.status_code == 503
    assert old.memory[key].state is OwnerState.OWNED
    assert key not in target.memory


async def test_conversation_below_issued_epoch_is_retried_above_it():
    async with rig(names="ab", settings=SOON) as fabric:
        first = await fabric.chat(LONG)
        agent = first.headers["x-macfabric-agent"]
        fabric.fleet.directory.issue(("default", agent), 7)
        second = await fabric.chat(LONG, "x", "y")
        left = fabric.fleet.ledger.turns(node_of(second))

    assert second.status_code == 200
    assert second.headers["x-macfabric-agent"] == agent
    assert second.headers["x-macfabric-epoch"] == "8"
    assert left == 0
    assert fabric[node_of(second)].running == 0
