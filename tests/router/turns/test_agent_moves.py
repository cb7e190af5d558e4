"""Idle agents whose next turn is served sooner elsewhere are moved first, over fake nodes."""

import asyncio
from contextlib import contextmanager

import pytest

from fabric.errors import RetryLaterError
from fabric.ids import AgentId, NodeName, TenantId
from fabric.settings import RouterSettings
from fabric.turn.generation import Prefilling
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
KEY = (TenantId("default"), AgentId("alice"))
QUEUE_S = 20.0


@contextmanager
def queue(fabric, name, seconds=QUEUE_S):
    """Book a turn that a node takes long to prefill."""
    entry = fabric.fleet.ledger.begin(NodeName(name), seconds, cold=False)
    try:
        yield
    finally:
        fabric.fleet.ledger.end(entry)


async def begin(fabric, agent="alice", text="hello"):
    """Take an agent's first turn, and wait until its node has listed the agent."""
    answer = await fabric.chat(text, agent=agent)
    assert answer.status_code == 200
    await fabric.fleet.membership.refresh(relist=True)
    return answer.headers["x-macfabric-node"]


async def ask(fabric, *contents, agent="alice"):
    answer = await fabric.chat(*contents, agent=agent)
    assert answer.status_code == 200
    return answer


def other_node(name):
    return "node-b" if name == "node-a" else "node-a"


async def test_agent_moves_to_idle_twin_with_its_cache_and_stays():
    async with rig("ab") as fabric:
        home = await begin(fabric)
        with queue(fabric, home):
            answers = [await ask(fabric, "hello", "x", f"and {i}") for i in range(5)]

        nodes = [answer.headers["x-macfabric-node"] for answer in answers]
        assert nodes == [other_node(home)] * 5
        assert int(answers[0].headers["x-macfabric-cached-tokens"]) > 0
        assert fabric.fleet.directory.owner(KEY).epoch == 2, "the agent moved once"


async def test_agent_does_not_bounce_between_queues():
    async with rig("ab") as fabric:
        home = await begin(fabric)
        nodes = []
        for at in range(5):
            owner = fabric.fleet.directory.owner(KEY).node
            with queue(fabric, owner, 0.7):
                nodes.append(
                    (await ask(fabric, "hello", "x", f"and {at}")).headers["x-macfabric-node"]
                )

        assert nodes == [other_node(home)] * 5


async def test_agent_found_by_content_moves():
    text = "A long beginning, so that the conversation has a sketch. " * 200
    async with rig("ab") as fabric:
        first = await fabric.chat(text)
        home = first.headers["x-macfabric-node"]
        answer = first.json()["choices"][0]["message"]["content"]
        await fabric.fleet.membership.refresh(relist=True)
        with queue(fabric, home):
            second = await fabric.chat(text, answer, "and now?")

    assert second.headers["x-macfabric-node"] == other_node(home)
    assert second.headers["x-macfabric-agent"] == first.headers["x-macfabric-agent"]
    assert int(second.headers["x-macfabric-cached-tokens"]) > 0


async def test_agent_with_running_stream_stays():
    async with rig("ab") as fabric:
        home = await begin(fabric)
        fabric[home].behaviour.delay_s = 0.05
        running = asyncio.create_task(ask(fabric, "hello", "x", "one two three four five six"))
        await until(lambda: not fabric.fleet.activity.is_idle(KEY))
        with queue(fabric, home):
            second = await ask(fabric, "hello", "x", "one two three four five six", "y", "z")
        await running

    assert second.headers["x-macfabric-node"] == home


async def test_agent_placed_by_client_stays():
    async with rig("ab") as fabric:
        home = await begin(fabric)
        target = other_node(home)
        moved = await fabric.http().post("/v1/agents/alice/migrate", json={"to": target})
        assert moved.status_code == 200
        await fabric.fleet.membership.refresh(relist=True)
        with queue(fabric, target):
            answer = await ask(fabric, "hello", "x", "and now?")

    assert answer.headers["x-macfabric-node"] == target


async def test_erasure_forgets_client_placement():
    async with rig("ab") as fabric:
        target = other_node(await begin(fabric))
        http = fabric.http()
        await http.post("/v1/agents/alice/migrate", json={"to": target})
        assert fabric.fleet.activity.is_held(KEY, target)
        assert (await http.delete("/v1/agents/alice")).status_code == 200

        assert not fabric.fleet.activity.is_held(KEY, target)


async def test_reported_queue_of_others_triggers_move():
    async with rig("ab", tended=False) as fabric:
        home = await begin(fabric)
        fabric[home].view_changes = {"queue_s": 30.0, "waiting": 2}
        await fabric.fleet.membership.refresh()
        answer = await ask(fabric, "hello", "x", "and now?")

    assert answer.headers["x-macfabric-node"] == other_node(home)


async def test_load_of_running_turn_is_its_remaining_prefill():
    async with rig("a", tended=False) as fabric:
        await begin(fabric, text="word " * 2_000)
        name, node = NodeName("node-a"), fabric["node-a"]
        node.behaviour.events = [Prefilling(4_000), Prefilling(9_000)]
        node.view_changes = {"prefill_tokens_per_s": 1_000.0}
        await fabric.fleet.membership.refresh()
        loads = []

        def note(*booked, real=fabric.fleet.ledger.rebook):
            real(*booked)
            loads.append(fabric.fleet.ledger.prefill_s(name))

        fabric.fleet.ledger.rebook = note
        await fabric.chat("word " * 2_000, "x", "word " * 2_000, agent="alice")

    assert loads[0] > loads[-1] == 0.0
    assert loads == sorted(loads, reverse=True)


async def test_agents_stay_when_moves_are_disabled():
    settings = RouterSettings(takeover_after_s=20.0, moves_idle_agents=False)
    async with rig("ab", settings=settings) as fabric:
        home = await begin(fabric)
        with queue(fabric, home):
            answer = await ask(fabric, "hello", "x", "and now?")

    assert answer.headers["x-macfabric-node"] == home


async def test_failed_move_leaves_turn_on_owner():
    async with rig("ab") as fabric:
        home = await begin(fabric)
        target = fabric[other_node(home)]
        target.behaviour.fail["copy_blocks"] = RetryLaterError("full", code="disk_error")
        with queue(fabric, home):
            answer = await ask(fabric, "hello", "x", "and now?")

        assert answer.headers["x-macfabric-node"] == home
        assert fabric.fleet.directory.owner(KEY).epoch == 1
        assert not fabric.fleet.ledger.turns(NodeName(target.name)), "its booking ended"
