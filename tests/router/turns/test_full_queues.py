"""A turn whose node has a full queue goes to another node with room."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from fabric.errors import OverloadedError
from fabric.ids import AgentId, NodeName, TenantId
from fabric.settings import RouterSettings
from fabric.turn.generation import Priority
from router.limits import SENT_BACKGROUND_TURNS_MAX, SENT_TURNS_MAX
from router.placement.choice import Policy
from router.placement.placement import Placement
from tests.router.fake_node import FakeNode
from tests.router.rig import rig

pytestmark = pytest.mark.anyio
TENANT = TenantId("default")
KEY = (TENANT, AgentId("alice"))
PLACES = {
    Priority.INTERACTIVE: SENT_TURNS_MAX // 2,
    Priority.BACKGROUND: SENT_BACKGROUND_TURNS_MAX // 2,
}
POLICIES = pytest.mark.parametrize("policy", list(Policy))
BUSY_S = 4.0  # of each turn in a queue


@asynccontextmanager
async def filled_queues(fabric, *names, priority=Priority.INTERACTIVE):
    """Fill the places and queues of nodes with turns of one tenant."""
    queues = fabric.services.turns.queues
    async with AsyncExitStack() as stack:
        for name in names:
            node = NodeName(name)
            for _ in range(PLACES[priority]):
                place = await queues.enter(node, TENANT, priority, BUSY_S)
                stack.callback(place.leave)
            waiting = asyncio.create_task(queues.enter(node, TENANT, priority, BUSY_S))
            stack.push_async_callback(_cancelled, waiting)
        await asyncio.sleep(0)
        yield


async def _cancelled(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def small_queue_rig(names="ab", *, policy=Policy.SECONDS, **settings):
    settings = RouterSettings(takeover_after_s=20.0, queue_max=1, **settings)
    return rig(names, settings=settings, placement=Placement(policy))


def other_node(name):
    return "node-b" if name == "node-a" else "node-a"


async def begin(fabric, agent="alice"):
    """Take an agent's first turn; return its node."""
    answer = await fabric.chat("hello", agent=agent)
    await fabric.fleet.membership.refresh(relist=True)
    return answer.headers["x-macfabric-node"]


@POLICIES
async def test_a_new_agent_starts_where_there_is_room(policy):
    async with small_queue_rig(policy=policy) as fabric:
        for number, name in enumerate(("node-a", "node-b")):
            async with filled_queues(fabric, name):
                answer = await fabric.chat("hello", agent=f"new-{number}")
                unnamed = await fabric.chat(f"hello {number}")
            assert answer.headers["x-macfabric-node"] == other_node(name)
            assert unnamed.headers["x-macfabric-node"] == other_node(name)


@POLICIES
async def test_an_idle_agent_moves_with_its_memory_where_there_is_room(policy):
    async with small_queue_rig(policy=policy) as fabric:
        home = await begin(fabric)
        async with filled_queues(fabric, home):
            answer = await fabric.chat("hello", "x", "and?", agent="alice")
        owner = fabric.fleet.directory.owner(KEY)

    assert answer.headers["x-macfabric-node"] == owner.node == other_node(home)
    assert owner.epoch == 2, "the agent moved: it was not taken over"
    assert int(answer.headers["x-macfabric-cached-tokens"]) > 0


async def test_an_agent_with_a_running_turn_waits_for_its_node():
    """Another node would recompute it, without the state that only its owner has."""
    async with small_queue_rig() as fabric:
        home = await begin(fabric)
        fabric.fleet.activity.begin_turn(KEY)
        async with filled_queues(fabric, home):
            answer = await fabric.chat("hello", "x", "and?", agent="alice")
        assert answer.status_code == 429
        assert home in answer.json()["error"]["message"]
        assert fabric.fleet.directory.owner(KEY).node == home
        assert fabric.fleet.directory.start_reservation(KEY) is None


async def test_an_agent_stays_where_moves_are_left_to_clients():
    async with small_queue_rig(moves_idle_agents=False) as fabric:
        home = await begin(fabric)
        async with filled_queues(fabric, home):
            answer = await fabric.chat("hello", "x", "and?", agent="alice")
    assert answer.status_code == 429


async def test_all_nodes_are_full_is_a_429_with_the_soonest_delay():
    async with small_queue_rig() as fabric:
        queues = fabric.services.turns.queues
        async with filled_queues(fabric, "node-a", "node-b"):
            waits_s = queues.full(TENANT, Priority.INTERACTIVE)
            assert waits_s == {"node-a": BUSY_S / 2, "node-b": BUSY_S / 2}
            async with slowed_queue(fabric, "node-b"):
                answer = await fabric.chat("hello")
        assert queues.full(TENANT, Priority.INTERACTIVE) == {}

    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) == BUSY_S / 2
    assert "no node" in answer.json()["error"]["message"]


@asynccontextmanager
async def slowed_queue(fabric, name):
    """Multiply the estimated time of a node's queue by ten."""
    queue = fabric.services.turns.queues._queue(NodeName(name), Priority.INTERACTIVE)
    pace = queue._pace
    pace._turns.append((10.0, 1.0))
    try:
        yield
    finally:
        pace._turns.clear()


async def test_a_background_turn_finds_room_by_queues_of_its_own():
    async with small_queue_rig() as fabric:
        http = fabric.http()
        http.headers["x-macfabric-priority"] = "background"
        async with filled_queues(fabric, "node-a", priority=Priority.BACKGROUND):
            moved = await fabric.chat("hello", agent="slow", http=http)
        async with filled_queues(fabric, "node-a", "node-b", priority=Priority.BACKGROUND):
            refused = await fabric.chat("hello", agent="slower", http=http)

    assert moved.headers["x-macfabric-node"] == "node-b"
    assert refused.status_code == 429


async def test_a_full_queue_of_background_turns_keeps_no_interactive_one_out():
    async with small_queue_rig() as fabric:
        home = await begin(fabric)
        background_queue = filled_queues(fabric, other_node(home), priority=Priority.BACKGROUND)
        async with filled_queues(fabric, home), background_queue:
            answer = await fabric.chat("hello", "x", "and?", agent="alice")
    assert answer.headers["x-macfabric-node"] == other_node(home)


async def test_an_idle_agent_moves_past_other_full_nodes():
    async with small_queue_rig("abc") as fabric:
        home = await begin(fabric)
        others = [name for name in ("node-a", "node-b", "node-c") if name != home]
        for at, last in enumerate(others):
            async with filled_queues(fabric, *(name for name in fabric.listed if name != last)):
                answer = await fabric.chat("hello", "x", f"{at}", agent="alice")
            assert answer.headers["x-macfabric-node"] == last
            await fabric.fleet.membership.refresh(relist=True)
        owner = fabric.fleet.directory.owner(KEY)
    assert owner.epoch == 3, "one move each time"


def refusing_node(name):
    """Return a node whose own queue is full."""
    node = FakeNode(name)
    node.behaviour.refuse = OverloadedError("9 requests wait on this node", retry_after_s=7.0)
    return node


async def test_a_turn_that_its_node_refuses_goes_elsewhere():
    async with rig(nodes=[refusing_node("node-a"), FakeNode("node-b")]) as fabric:
        answers = [await fabric.chat("hello", agent=f"agent-{number}") for number in range(4)]
    assert {answer.headers["x-macfabric-node"] for answer in answers} == {"node-b"}


async def test_nodes_that_all_refuse_are_a_429_with_their_delay():
    async with rig(nodes=[refusing_node("node-a"), refusing_node("node-b")]) as fabric:
        answer = await fabric.chat("hello")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
