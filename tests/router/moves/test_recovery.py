from dataclasses import replace

import pytest

from fabric.errors import UNDECIDED, FabricError
from fabric.record.manifest import OwnerState
from router.limits import LEASE_S
from tests.router.fake_memory import Memory
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
TEXT = "<user>" + "word " * 300
KEY = ("default", "alice")
OWNED, SEALED, REPLICA = OwnerState.OWNED, OwnerState.SEALED, OwnerState.REPLICA


def sealed_node(name="node-a", to="node-b", epoch=3):
    node = FakeNode(name)
    node.memory[KEY] = Memory(
        *KEY, epoch=epoch, state=SEALED, text=TEXT, migration="mig_of_another_router", sealed_to=to
    )
    return node


async def ask(made):
    return await made.chat(TEXT.removeprefix("<user>"), agent="alice")


async def test_a_sealed_agent_resumes_once_its_target_denies_it():
    async with rig(nodes=[sealed_node(), FakeNode("node-b")]) as made:
        answer = await ask(made)

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-node"] == "node-a"
    assert answer.headers["x-macfabric-match"] == "exact"
    assert int(answer.headers["x-macfabric-epoch"]) > 4, "above any commit that is still on its way"
    assert made["node-b"].aborted


async def test_a_sealed_agent_belongs_to_a_target_that_committed():
    target = FakeNode("node-b")
    target.memory[KEY] = Memory(*KEY, epoch=4, text=TEXT)
    async with rig(nodes=[sealed_node(), target]) as made:
        answer = await ask(made)
        await until(lambda: made["node-a"].memory[KEY].state is REPLICA)

    assert answer.headers["x-macfabric-node"] == "node-b"
    assert answer.headers["x-macfabric-epoch"] == "4"
    assert not made["node-a"].aborted


async def test_a_sealed_agent_waits_while_its_target_is_silent_but_may_live():
    async with rig(nodes=[sealed_node(), FakeNode("node-b")], tended=False) as made:
        made["node-b"].does.hang = True
        made.fleet.membership.find("node-b").heartbeat_s -= 4.0  # suspect
        heartbeat = made.fleet.membership.heartbeat
        made.fleet.membership.heartbeat = lambda member, *rest, **named: heartbeat(member, 0.05)
        answer = await ask(made)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "agent_moving"
    assert made["node-a"].memory[KEY].state is SEALED


async def test_a_sealed_agent_resumes_when_its_targets_lease_is_over():
    async with rig(nodes=[sealed_node(), FakeNode("node-b")], scale=4.0) as made:
        await made["node-b"].stop()
        await until(lambda: not made.fleet.is_up("node-b"))
        answer = await ask(made)

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-match"] == "exact"


async def test_an_unknown_target_gets_one_lease_to_appear():
    async with rig(nodes=[sealed_node(to="node-z")], scale=1.0, tended=False) as made:
        early = await ask(made)
        made.services.recovery._since_s -= LEASE_S
        late = await ask(made)

    assert early.status_code == 503
    assert late.status_code == 200
    assert late.headers["x-macfabric-match"] == "exact"


async def test_a_migration_that_is_named_is_aborted_by_its_name(monkeypatch):
    node = sealed_node()
    old_list = node._list

    async with rig(nodes=[node, FakeNode("node-b")], tended=False) as made:
        holding = made.fleet.directory.owner(KEY)
        named = replace(holding.view, migration="mig_of_another_router")
        directory = made.fleet.directory
        monkeypatch.setattr(
            directory,
            "owner",
            lambda key, owner=directory.owner: (
                replace(found, view=named)
                if (found := owner(key)) and found.state is SEALED
                else found
            ),
        )
        answer = await ask(made)

    assert old_list
    assert answer.headers["x-macfabric-epoch"] == "3"
    assert "mig_of_another_router" in node.aborted
    assert node.memory[KEY].state is OWNED


async def test_the_lower_of_two_claims_gives_way():
    one, two = FakeNode("node-a"), FakeNode("node-b")
    one.memory[KEY] = Memory(*KEY, epoch=3, text=TEXT)
    two.memory[KEY] = Memory(*KEY, epoch=5, text=TEXT)
    async with rig(nodes=[one, two]) as made:
        await until(lambda: one.memory[KEY].state is REPLICA)
        answer = await ask(made)

    assert answer.headers["x-macfabric-node"] == "node-b"
    assert two.memory[KEY].state is OWNED
    assert one.memory[KEY].epoch == 5


@pytest.mark.parametrize(("turns", "owner"), [((0, 0), "node-b"), ((2, 1), "node-a")])
async def test_of_equal_claims_the_one_with_more_turns_wins(turns, owner):
    one, two = FakeNode("node-a"), FakeNode("node-b")
    for node, count in zip((one, two), turns, strict=True):
        node.memory[KEY] = Memory(*KEY, epoch=3, text=TEXT, revision=count)
    keeps, gives_way = (one, two) if owner == "node-a" else (two, one)
    async with rig(nodes=[one, two]) as made:
        answers = [await ask(made) for _ in range(3)]
        await until(lambda: gives_way.memory[KEY].state is REPLICA)
        answers.append(await ask(made))
        moved = await made.http().post("/v1/agents/alice/migrate", json={"to": gives_way.name})

    assert {a.headers["x-macfabric-node"] for a in answers} == {owner}
    assert keeps.memory[KEY].state is REPLICA
    assert moved.status_code == 200
    assert moved.json()["epoch"] > 4, "above the epoch at which the other one gave way"


async def test_an_undecided_target_makes_the_source_release():
    """Its disk may have the commit, so the agent continues at an epoch above it."""
    target = FakeNode("node-b")
    target.does.fail["abort_migration"] = FabricError("the disk cannot tell", code=UNDECIDED)
    async with rig(nodes=[sealed_node(), target]) as made:
        answer = await ask(made)

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-match"] == "exact"
    assert int(answer.headers["x-macfabric-epoch"]) > 4


async def test_a_new_router_recovers_from_the_nodes_reports():
    nodes = [FakeNode(f"node-{letter}") for letter in "abc"]
    async with rig(nodes=nodes) as made:
        texts = {f"agent-{i}": f"memory of {i} " * 50 for i in range(6)}
        before = {
            agent: (await made.chat(text, agent=agent)).headers["x-macfabric-node"]
            for agent, text in texts.items()
        }
    async with rig(nodes=nodes) as made:
        after = {agent: await made.chat(text, agent=agent) for agent, text in texts.items()}

    assert {agent: a.headers["x-macfabric-node"] for agent, a in after.items()} == before
    assert {a.headers["x-macfabric-match"] for a in after.values()} == {"exact"}
