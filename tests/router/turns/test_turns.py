import asyncio

import pytest

from fabric.errors import RetryElsewhereError, StaleEpochError
from fabric.record.manifest import OwnerState
from router.placement.choice import Policy
from router.placement.placement import Placement
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
LONG = "word " * 1000


def node_of(answer):
    return answer.headers["x-macfabric-node"]


async def test_agent_stays_with_its_owner():
    async with rig() as fabric:
        answers = [await fabric.chat(*["hi"] * (2 * i + 1), agent="alice") for i in range(4)]

    assert len({node_of(answer) for answer in answers}) == 1
    assert [a.headers["x-macfabric-match"] for a in answers] == ["none"] + ["extend"] * 3


async def test_new_agents_spread_over_idle_nodes():
    async with rig() as fabric:
        nodes = [node_of(await fabric.chat("hi", agent=f"agent-{i}")) for i in range(6)]

    assert sorted(nodes) == ["node-a", "node-a", "node-b", "node-b", "node-c", "node-c"]


async def test_simultaneous_first_turns_of_an_agent_go_to_one_node():
    async with rig(started=True, tended=False) as fabric:
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s = 0.1
        answers = await asyncio.gather(*(fabric.chat("hi", agent="alice") for _ in range(8)))
        others = await asyncio.gather(*(fabric.chat("hi", agent=f"b{i}") for i in range(6)))

    assert {answer.status_code for answer in answers} == {200}
    assert len({node_of(answer) for answer in answers}) == 1
    assert len({node_of(answer) for answer in others}) == 3
    assert fabric.fleet.directory.reservation(("default", "alice")) is None


async def test_unnamed_conversation_is_found_by_its_content():
    async with rig() as fabric:
        first = await fabric.chat(LONG)
        second = await fabric.chat(LONG, "hm", "and then?")
        third = await fabric.chat(LONG, "hm", "and then?", "well", "so?")

    assert node_of(first) == node_of(second) == node_of(third)
    assert second.headers["x-macfabric-match"] == third.headers["x-macfabric-match"] == "extend"
    assert third.headers["x-macfabric-agent"] == first.headers["x-macfabric-agent"]


async def test_short_unnamed_conversation_returns_to_its_node():
    async with rig() as fabric:
        for i in range(8):
            first = await fabric.chat(f"hello {i}")
            second = await fabric.chat(f"hello {i}", "hi", "more")
            assert node_of(first) == node_of(second)
            assert second.headers["x-macfabric-match"] == "extend"


async def test_unnamed_conversations_with_different_openings_spread():
    async with rig() as fabric:
        nodes = {node_of(await fabric.chat(f"opening number {i}")) for i in range(20)}

    assert len(nodes) == 3


async def test_group_conversations_have_distinct_agents():
    async with rig() as fabric:
        one = await fabric.chat("first " + LONG, prompt_cache_key="team")
        two = await fabric.chat("second " + LONG, prompt_cache_key="team")
        await fabric.services.recovery.round()  # as a heartbeat would: one claim per name
        again = await fabric.chat("first " + LONG, "x", "y", prompt_cache_key="team")

    first, second, third = (each.headers["x-macfabric-agent"] for each in (one, two, again))
    assert first.startswith("team~")
    assert second.startswith("team~")
    assert third == first != second
    assert again.headers["x-macfabric-match"] == "extend"


async def test_requests_carry_sketch_and_owner_epoch():
    async with rig("a") as fabric:
        await fabric.chat(LONG, agent="alice")
        await fabric.chat(LONG, agent="alice")
        await fabric.chat(LONG)
        first, second, third = fabric["node-a"].requests

    assert (first.epoch, second.epoch, third.epoch) == (0, 1, 0)
    assert len(first.sketch) == 10
    assert first.operation != second.operation


async def test_unreported_owner_is_found_by_one_refresh():
    async with rig(tended=False) as fabric:
        first = await fabric.chat(LONG, agent="alice")
        other = next(node for node in fabric.nodes.values() if node.name != node_of(first))
        old = fabric[node_of(first)].memory["default", "alice"]
        other.memory[old.key] = Memory(*old.key, epoch=5, text=old.text)
        old.state, old.epoch = OwnerState.REPLICA, 5
        other.changes += 1
        fabric[node_of(first)].changes += 1
        second = await fabric.chat(LONG, agent="alice")

    assert node_of(second) == other.name
    assert second.headers["x-macfabric-epoch"] == "5"
    assert second.headers["x-macfabric-match"] == "exact"


@pytest.mark.parametrize("error", [RetryElsewhereError("no"), StaleEpochError("no")])
async def test_refusing_owner_is_retried_once(error):
    async with rig("a") as fabric:
        await fabric.chat("hi", agent="alice")
        fabric["node-a"].behaviour.refuse = error
        answer = await fabric.chat("hi", agent="alice")
        requests = len(fabric["node-a"].requests)

    assert answer.status_code == 503
    assert requests == 3


async def test_turn_waits_for_unreported_nodes():
    late = FakeNode("node-b")
    late.memory["default", "alice"] = Memory("default", "alice", epoch=4, text=f"<user>{LONG}")
    late.behaviour.slow["list_agents"] = 0.4
    async with rig(nodes=[FakeNode("node-a"), late], started=False) as fabric:
        await until(fabric.fleet.ready)
        answer = await fabric.chat(LONG, agent="alice")

    assert node_of(answer) == "node-b"
    assert answer.headers["x-macfabric-match"] == "exact"


async def test_turn_of_unknown_agent_waits_for_late_node():
    late, prompt = FakeNode("node-b"), LONG * 10
    late.memory["default", "alice"] = Memory("default", "alice", epoch=4, text=f"<user>{prompt}")
    late.behaviour.slow["list_agents"] = 0.5
    async with rig(nodes=[FakeNode("node-a"), late], started=False) as fabric:
        fabric.listed.pop("node-b")
        await until(fabric.fleet.membership.is_settled)
        await fabric.chat("hi", agent="bob")
        fabric.fleet.discovery._until_s = 0.0  # the router's start is long past
        fabric.listed["node-b"] = late
        await until(lambda: fabric.fleet.membership.find("node-b"))
        known, unnamed = await fabric.chat("hi", agent="bob"), await fabric.chat("hi")
        has_listed = fabric.fleet.membership.find("node-b").listed is not None
        answer = await fabric.chat(prompt, agent="alice")

    assert {known.status_code, unnamed.status_code, has_listed} == {200, False}
    assert node_of(answer) == "node-b"
    assert answer.headers["x-macfabric-epoch"] == "4", "the agent was not started again"


async def test_new_router_waits_for_reports_of_later_owners():
    """A node that took the agent over may not have reported yet."""
    before, after = FakeNode("node-a"), FakeNode("node-b")
    for node, epoch in (before, 1), (after, 3):
        memory = Memory("default", "alice", epoch=epoch, text=f"<user>{LONG}")
        node.memory["default", "alice"] = memory
    after.behaviour.slow["list_agents"] = 0.4
    async with rig(nodes=[before, after], started=False) as fabric:
        await until(lambda: fabric.fleet.directory.owner(("default", "alice")))
        answer = await fabric.chat(LONG, agent="alice")

    assert node_of(answer) == "node-b"


async def test_new_agents_start_while_a_node_is_lost():
    async with rig() as fabric:
        await fabric["node-b"].stop()
        answers = [await fabric.chat("hi", agent=f"agent-{i}") for i in range(6)]

    assert {answer.status_code for answer in answers} == {200}
    assert "node-b" not in {node_of(answer) for answer in answers}


async def test_turn_is_503_without_any_node():
    async with rig("a", started=False, tended=False, scale=20) as fabric:
        before = await fabric.chat("hi")
        health = await fabric.http().get("/healthz")
        await fabric.fleet.membership.discover()
        await fabric.fleet.membership.refresh()
        await fabric["node-a"].stop()
        after = await fabric.chat("hi", agent="alice")

    assert before.status_code == after.status_code == health.status_code == 503
    assert before.json()["error"]["code"] == "no_node_ready"
    assert after.headers["retry-after"] == "2"


async def test_node_error_is_not_retried_elsewhere():
    async with rig() as fabric:
        for node in fabric.nodes.values():
            node.behaviour.raw_answer = (500, b"{}")
        answer = await fabric.chat("hi")
        requests_count = sum(len(node.requests) for node in fabric.nodes.values())

    assert answer.status_code == 500
    assert requests_count == 1


async def test_draining_node_keeps_its_agents_and_gets_no_new_ones():
    async with rig("ab") as fabric:
        first = await fabric.chat("hi", agent="alice")
        fabric[node_of(first)].view_changes = {"state": "draining"}
        await fabric.fleet.membership.refresh()
        again = await fabric.chat("hi", agent="alice")
        others = {node_of(await fabric.chat("hi", agent=f"b{i}")) for i in range(4)}

    assert node_of(again) == node_of(first)
    assert node_of(first) not in others
    assert len(others) == 1


async def test_turns_go_to_nodes_with_their_model():
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="other"), FakeNode("node-c")]
    async with rig(nodes=nodes) as fabric:
        mine = {node_of(await fabric.chat("hi", agent=f"a{i}", model="other")) for i in range(3)}
        theirs = {node_of(await fabric.chat("hi", agent=f"b{i}")) for i in range(4)}

    assert mine == {"node-b"}
    assert theirs == {"node-a", "node-c"}


async def test_round_robin_ignores_cached_prefixes():
    async with rig(placement=Placement(Policy.ROUND_ROBIN)) as fabric:
        nodes = [node_of(await fabric.chat(LONG)) for _ in range(6)]

    assert nodes == ["node-a", "node-b", "node-c"] * 2
