import asyncio

import pytest

from fabric.errors import RetryElsewhereError, StaleEpochError
from fabric.record.manifest import OwnerState
from router.placement.placement import Placement
from router.placement.seconds import Policy
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
LONG = "word " * 1000


def node_of(answer):
    return answer.headers["x-macfabric-node"]


async def test_an_agent_stays_with_its_owner():
    async with rig() as made:
        answers = [await made.chat(*["hi"] * (2 * i + 1), agent="alice") for i in range(4)]

    assert len({node_of(answer) for answer in answers}) == 1
    assert [a.headers["x-macfabric-match"] for a in answers] == ["none"] + ["extend"] * 3


async def test_new_agents_spread_over_idle_nodes():
    async with rig() as made:
        nodes = [node_of(await made.chat("hi", agent=f"agent-{i}")) for i in range(6)]

    assert sorted(nodes) == ["node-a", "node-a", "node-b", "node-b", "node-c", "node-c"]


async def test_first_turns_of_one_new_agent_at_once_go_to_one_node():
    async with rig(started=True, tended=False) as made:
        for node in made.nodes.values():
            node.does.first_delay_s = 0.1
        answers = await asyncio.gather(*(made.chat("hi", agent="alice") for _ in range(8)))
        others = await asyncio.gather(*(made.chat("hi", agent=f"b{i}") for i in range(6)))

    assert {answer.status_code for answer in answers} == {200}
    assert len({node_of(answer) for answer in answers}) == 1
    assert len({node_of(answer) for answer in others}) == 3
    assert made.fleet.directory.reservation(("default", "alice")) is None


async def test_an_unnamed_conversation_is_found_by_its_content():
    async with rig() as made:
        first = await made.chat(LONG)
        second = await made.chat(LONG, "hm", "and then?")
        third = await made.chat(LONG, "hm", "and then?", "well", "so?")

    assert node_of(first) == node_of(second) == node_of(third)
    assert second.headers["x-macfabric-match"] == third.headers["x-macfabric-match"] == "extend"
    assert third.headers["x-macfabric-agent"] == first.headers["x-macfabric-agent"]


async def test_a_short_unnamed_conversation_comes_back_to_its_node_too():
    async with rig() as made:
        for i in range(8):
            first = await made.chat(f"hello {i}")
            second = await made.chat(f"hello {i}", "hi", "more")
            assert node_of(first) == node_of(second)
            assert second.headers["x-macfabric-match"] == "extend"


async def test_unnamed_conversations_with_different_openings_spread():
    async with rig() as made:
        nodes = {node_of(await made.chat(f"opening number {i}")) for i in range(20)}

    assert len(nodes) == 3


async def test_a_group_keeps_its_conversations_apart_and_together():
    async with rig() as made:
        one = await made.chat("first " + LONG, prompt_cache_key="team")
        two = await made.chat("second " + LONG, prompt_cache_key="team")
        await made.services.recovery.round()  # as a heartbeat in between: one claim for each name
        again = await made.chat("first " + LONG, "x", "y", prompt_cache_key="team")

    first, second, third = (each.headers["x-macfabric-agent"] for each in (one, two, again))
    assert first.startswith("team~")
    assert second.startswith("team~")
    assert third == first != second
    assert again.headers["x-macfabric-match"] == "extend"


async def test_requests_carry_the_sketch_and_the_owners_epoch():
    async with rig("a") as made:
        await made.chat(LONG, agent="alice")
        await made.chat(LONG, agent="alice")
        await made.chat(LONG)
        first, second, third = made["node-a"].requests

    assert (first.epoch, second.epoch, third.epoch) == (0, 1, 0)
    assert len(first.sketch) == 10
    assert first.operation != second.operation


async def test_an_owner_elsewhere_is_found_by_asking_the_nodes_once():
    async with rig(tended=False) as made:
        first = await made.chat(LONG, agent="alice")
        other = next(node for node in made.nodes.values() if node.name != node_of(first))
        old = made[node_of(first)].memory["default", "alice"]
        other.memory[old.key] = Memory(*old.key, epoch=5, text=old.text)
        old.state, old.epoch = OwnerState.REPLICA, 5
        other.changes += 1
        made[node_of(first)].changes += 1
        second = await made.chat(LONG, agent="alice")

    assert node_of(second) == other.name
    assert second.headers["x-macfabric-epoch"] == "5"
    assert second.headers["x-macfabric-match"] == "exact"


@pytest.mark.parametrize("error", [RetryElsewhereError("no"), StaleEpochError("no")])
async def test_an_owner_that_refuses_is_asked_twice_only(error):
    async with rig("a") as made:
        await made.chat("hi", agent="alice")
        made["node-a"].does.refuse = error
        answer = await made.chat("hi", agent="alice")
        requests = len(made["node-a"].requests)

    assert answer.status_code == 503
    assert requests == 3


async def test_nodes_that_have_not_reported_are_waited_for():
    late = FakeNode("node-b")
    late.memory["default", "alice"] = Memory("default", "alice", epoch=4, text=f"<user>{LONG}")
    late.does.slow["list_agents"] = 0.4
    async with rig(nodes=[FakeNode("node-a"), late], started=False) as made:
        await until(made.fleet.ready)
        answer = await made.chat(LONG, agent="alice")

    assert node_of(answer) == "node-b"
    assert answer.headers["x-macfabric-match"] == "exact"


async def test_a_late_node_is_waited_for_if_the_agent_is_unknown():
    late, said = FakeNode("node-b"), LONG * 10
    late.memory["default", "alice"] = Memory("default", "alice", epoch=4, text=f"<user>{said}")
    late.does.slow["list_agents"] = 0.5
    async with rig(nodes=[FakeNode("node-a"), late], started=False) as made:
        made.listed.pop("node-b")
        await until(made.fleet.membership.settled)
        await made.chat("hi", agent="bob")
        made.fleet.discovery._until_s = 0.0  # this router is no new one
        made.listed["node-b"] = late
        await until(lambda: made.fleet.membership.find("node-b"))
        known, unnamed = await made.chat("hi", agent="bob"), await made.chat("hi")
        was_told = made.fleet.membership.find("node-b").listed is not None
        answer = await made.chat(said, agent="alice")

    assert {known.status_code, unnamed.status_code, was_told} == {200, False}
    assert node_of(answer) == "node-b"
    assert answer.headers["x-macfabric-epoch"] == "4", "it was not begun anew"


async def test_an_owner_that_a_new_router_knows_may_not_be_the_last_one():
    """A node that took the agent over may not have reported yet."""
    before, after = FakeNode("node-a"), FakeNode("node-b")
    for node, epoch in (before, 1), (after, 3):
        memory = Memory("default", "alice", epoch=epoch, text=f"<user>{LONG}")
        node.memory["default", "alice"] = memory
    after.does.slow["list_agents"] = 0.4
    async with rig(nodes=[before, after], started=False) as made:
        await until(lambda: made.fleet.directory.owner(("default", "alice")))
        answer = await made.chat(LONG, agent="alice")

    assert node_of(answer) == "node-b"


async def test_new_agents_start_while_a_node_is_lost():
    async with rig() as made:
        await made["node-b"].stop()
        answers = [await made.chat("hi", agent=f"agent-{i}") for i in range(6)]

    assert {answer.status_code for answer in answers} == {200}
    assert "node-b" not in {node_of(answer) for answer in answers}


async def test_no_node_at_all():
    async with rig("a", started=False, tended=False, scale=20) as made:
        before = await made.chat("hi")
        health = await made.http().get("/healthz")
        await made.fleet.membership.discover()
        await made.fleet.membership.refresh()
        await made["node-a"].stop()
        after = await made.chat("hi", agent="alice")

    assert before.status_code == after.status_code == health.status_code == 503
    assert before.json()["error"]["code"] == "no_node_ready"
    assert after.headers["retry-after"] == "2"


async def test_the_refusal_of_a_node_is_not_tried_elsewhere():
    async with rig() as made:
        for node in made.nodes.values():
            node.does.raw_answer = (500, b"{}")
        answer = await made.chat("hi")
        tried = sum(len(node.requests) for node in made.nodes.values())

    assert answer.status_code == 500
    assert tried == 1


async def test_a_draining_node_keeps_its_agents_and_gets_no_new_ones():
    async with rig("ab") as made:
        first = await made.chat("hi", agent="alice")
        made[node_of(first)].view_changes = {"state": "draining"}
        await made.fleet.membership.refresh()
        again = await made.chat("hi", agent="alice")
        others = {node_of(await made.chat("hi", agent=f"b{i}")) for i in range(4)}

    assert node_of(again) == node_of(first)
    assert node_of(first) not in others
    assert len(others) == 1


async def test_only_nodes_with_the_model_get_its_turns():
    nodes = [FakeNode("node-a"), FakeNode("node-b", model="other"), FakeNode("node-c")]
    async with rig(nodes=nodes) as made:
        mine = {node_of(await made.chat("hi", agent=f"a{i}", model="other")) for i in range(3)}
        theirs = {node_of(await made.chat("hi", agent=f"b{i}")) for i in range(4)}

    assert mine == {"node-b"}
    assert theirs == {"node-a", "node-c"}


async def test_round_robin_ignores_memory():
    async with rig(placement=Placement(Policy.ROUND_ROBIN)) as made:
        nodes = [node_of(await made.chat(LONG)) for _ in range(6)]

    assert nodes == ["node-a", "node-b", "node-c"] * 2
