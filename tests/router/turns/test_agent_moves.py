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
def queue(made, name, seconds=QUEUE_S):
    """Book a turn that a node takes long to prefill."""
    entry = made.fleet.ledger.begin(NodeName(name), seconds, cold=False)
    try:
        yield
    finally:
        made.fleet.ledger.end(entry)


async def begin(made, agent="alice", text="hello"):
    """Have an agent's first turn, and wait until its node has listed it."""
    answer = await made.chat(text, agent=agent)
    assert answer.status_code == 200
    await made.fleet.membership.refresh(relist=True)
    return answer.headers["x-macfabric-node"]


async def ask(made, *contents, agent="alice"):
    answer = await made.chat(*contents, agent=agent)
    assert answer.status_code == 200
    return answer


def other_of(name):
    return "node-b" if name == "node-a" else "node-a"


async def test_a_turn_goes_to_the_idle_twin_with_its_memory_and_the_next_ones_stay_there():
    async with rig("ab") as made:
        home = await begin(made)
        with queue(made, home):
            answers = [await ask(made, "hello", "x", f"and {i}") for i in range(5)]

        nodes = [answer.headers["x-macfabric-node"] for answer in answers]
        assert nodes == [other_of(home)] * 5
        assert int(answers[0].headers["x-macfabric-cached-tokens"]) > 0
        assert made.fleet.directory.owner(KEY).epoch == 2, "it moved once"


async def test_five_turns_do_not_bounce_between_queues():
    async with rig("ab") as made:
        home = await begin(made)
        nodes = []
        for at in range(5):
            owner = made.fleet.directory.owner(KEY).node
            with queue(made, owner, 0.7):
                nodes.append(
                    (await ask(made, "hello", "x", f"and {at}")).headers["x-macfabric-node"]
                )

        assert nodes == [other_of(home)] * 5


async def test_an_agent_found_by_content_moves_too():
    text = "A long beginning, so that the conversation has a sketch. " * 200
    async with rig("ab") as made:
        first = await made.chat(text)
        home = first.headers["x-macfabric-node"]
        said = first.json()["choices"][0]["message"]["content"]
        await made.fleet.membership.refresh(relist=True)
        with queue(made, home):
            second = await made.chat(text, said, "and now?")

    assert second.headers["x-macfabric-node"] == other_of(home)
    assert second.headers["x-macfabric-agent"] == first.headers["x-macfabric-agent"]
    assert int(second.headers["x-macfabric-cached-tokens"]) > 0


async def test_an_agent_that_streams_stays():
    async with rig("ab") as made:
        home = await begin(made)
        made[home].does.delay_s = 0.05
        running = asyncio.create_task(ask(made, "hello", "x", "one two three four five six"))
        await until(lambda: not made.fleet.activity.is_idle(KEY))
        with queue(made, home):
            second = await ask(made, "hello", "x", "one two three four five six", "y", "z")
        await running

    assert second.headers["x-macfabric-node"] == home


async def test_an_agent_that_a_client_has_placed_stays_there():
    async with rig("ab") as made:
        home = await begin(made)
        target = other_of(home)
        moved = await made.http().post("/v1/agents/alice/migrate", json={"to": target})
        assert moved.status_code == 200
        await made.fleet.membership.refresh(relist=True)
        with queue(made, target):
            answer = await ask(made, "hello", "x", "and now?")

    assert answer.headers["x-macfabric-node"] == target


async def test_an_erasure_forgets_where_a_client_placed_the_agent():
    async with rig("ab") as made:
        target = other_of(await begin(made))
        http = made.http()
        await http.post("/v1/agents/alice/migrate", json={"to": target})
        assert made.fleet.activity.is_held(KEY, target)
        assert (await http.delete("/v1/agents/alice")).status_code == 200

        assert not made.fleet.activity.is_held(KEY, target)


async def test_the_queue_that_a_node_reports_counts_too():
    async with rig("ab", tended=False) as made:
        home = await begin(made)
        made[home].view_changes = {"queue_s": 30.0}
        await made.fleet.membership.refresh()
        answer = await ask(made, "hello", "x", "and now?")

    assert answer.headers["x-macfabric-node"] == other_of(home)


async def test_a_running_turns_load_is_what_its_node_has_still_to_prefill():
    async with rig("a", tended=False) as made:
        await begin(made, text="word " * 2_000)
        name, node = NodeName("node-a"), made["node-a"]
        node.does.events = [Prefilling(4_000), Prefilling(9_000)]
        node.view_changes = {"prefill_tokens_per_s": 1_000.0}
        await made.fleet.membership.refresh()
        loads = []

        def note(*booked, real=made.fleet.ledger.rebook):
            real(*booked)
            loads.append(made.fleet.ledger.prefill_s(name))

        made.fleet.ledger.rebook = note
        await made.chat("word " * 2_000, "x", "word " * 2_000, agent="alice")

    assert loads[0] > loads[-1] == 0.0
    assert loads == sorted(loads, reverse=True)


async def test_agents_stay_where_the_operator_wants_no_moves():
    settings = RouterSettings(takeover_after_s=20.0, moves_idle_agents=False)
    async with rig("ab", settings=settings) as made:
        home = await begin(made)
        with queue(made, home):
            answer = await ask(made, "hello", "x", "and now?")

    assert answer.headers["x-macfabric-node"] == home


async def test_a_move_that_fails_leaves_the_turn_to_the_owner():
    async with rig("ab") as made:
        home = await begin(made)
        target = made[other_of(home)]
        target.does.fail["copy_blocks"] = RetryLaterError("full", code="disk_error")
        with queue(made, home):
            answer = await ask(made, "hello", "x", "and now?")

        assert answer.headers["x-macfabric-node"] == home
        assert made.fleet.directory.owner(KEY).epoch == 1
        assert not made.fleet.ledger.turns(NodeName(target.name)), "its booking ended"
