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


async def ask(fabric):
    return await fabric.chat(TEXT.removeprefix("<user>"), agent="alice")


async def test_sealed_agent_resumes_when_target_denies_the_move():
    async with rig(nodes=[sealed_node(), FakeNode("node-b")]) as fabric:
        answer = await ask(fabric)

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-node"] == "node-a"
    assert answer.headers["x-macfabric-match"] == "exact"
    assert int(answer.headers["x-macfabric-epoch"]) > 4, "above any commit that is still on its way"
    assert fabric["node-b"].aborted


async def test_sealed_agent_belongs_to_committed_target():
    target = FakeNode("node-b")
    target.memory[KEY] = Memory(*KEY, epoch=4, text=TEXT)
    async with rig(nodes=[sealed_node(), target]) as fabric:
        answer = await ask(fabric)
        await until(lambda: fabric["node-a"].memory[KEY].state is REPLICA)

    assert answer.headers["x-macfabric-node"] == "node-b"
    assert answer.headers["x-macfabric-epoch"] == "4"
    assert not fabric["node-a"].aborted


async def test_sealed_agent_waits_while_target_is_suspect():
    async with rig(nodes=[sealed_node(), FakeNode("node-b")], tended=False) as fabric:
        fabric["node-b"].behaviour.hang = True
        fabric.fleet.membership.find("node-b").heartbeat_s -= 4.0  # suspect
        heartbeat = fabric.fleet.membership.heartbeat
        fabric.fleet.membership.heartbeat = lambda member, *rest, **named: heartbeat(member, 0.05)
        answer = await ask(fabric)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "agent_moving"
    assert fabric["node-a"].memory[KEY].state is SEALED


async def test_sealed_agent_resumes_when_target_lease_expires():
    async with rig(nodes=[sealed_node(), FakeNode("node-b")], scale=4.0) as fabric:
        await fabric["node-b"].stop()
        await until(lambda: not fabric.fleet.is_up("node-b"))
        answer = await ask(fabric)

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-match"] == "exact"


async def test_unknown_target_gets_one_lease_to_appear():
    async with rig(nodes=[sealed_node(to="node-z")], scale=1.0, tended=False) as fabric:
        early = await ask(fabric)
        fabric.services.recovery._since_s -= LEASE_S
        late = await ask(fabric)

    assert early.status_code == 503
    assert late.status_code == 200
    assert late.headers["x-macfabric-match"] == "exact"


async def test_named_migration_is_aborted_by_name(monkeypatch):
    node = sealed_node()
    old_list = node._list

    async with rig(nodes=[node, FakeNode("node-b")], tended=False) as fabric:
        holding = fabric.fleet.directory.owner(KEY)
        named = replace(holding.view, migration="mig_of_another_router")
        directory = fabric.fleet.directory
        monkeypatch.setattr(
            directory,
            "owner",
            lambda key, owner=directory.owner: (
                replace(found, view=named)
                if (found := owner(key)) and found.state is SEALED
                else found
            ),
        )
        answer = await ask(fabric)

    assert old_list
    assert answer.headers["x-macfabric-epoch"] == "3"
    assert "mig_of_another_router" in node.aborted
    assert node.memory[KEY].state is OWNED


async def test_lower_of_two_claims_becomes_replica():
    one, two = FakeNode("node-a"), FakeNode("node-b")
    one.memory[KEY] = Memory(*KEY, epoch=3, text=TEXT)
    two.memory[KEY] = Memory(*KEY, epoch=5, text=TEXT)
    async with rig(nodes=[one, two]) as fabric:
        await until(lambda: one.memory[KEY].state is REPLICA)
        answer = await ask(fabric)

    assert answer.headers["x-macfabric-node"] == "node-b"
    assert two.memory[KEY].state is OWNED
    assert one.memory[KEY].epoch == 5


@pytest.mark.parametrize(("turns", "owner"), [((0, 0), "node-b"), ((2, 1), "node-a")])
async def test_equal_claims_are_decided_by_number_of_turns(turns, owner):
    one, two = FakeNode("node-a"), FakeNode("node-b")
    for node, count in zip((one, two), turns, strict=True):
        node.memory[KEY] = Memory(*KEY, epoch=3, text=TEXT, revision=count)
    wins, loses = (one, two) if owner == "node-a" else (two, one)
    async with rig(nodes=[one, two]) as fabric:
        answers = [await ask(fabric) for _ in range(3)]
        await until(lambda: loses.memory[KEY].state is REPLICA)
        answers.append(await ask(fabric))
        moved = await fabric.http().post("/v1/agents/alice/migrate", json={"to": loses.name})

    assert {a.headers["x-macfabric-node"] for a in answers} == {owner}
    assert wins.memory[KEY].state is REPLICA
    assert moved.status_code == 200
    assert moved.json()["epoch"] > 4, "above the epoch that ended the other claim"


async def test_undecided_target_makes_source_release():
    """The target's disk may hold the commit, so the agent continues at a higher epoch."""
    target = FakeNode("node-b")
    target.behaviour.fail["abort_migration"] = FabricError("the disk cannot tell", code=UNDECIDED)
    async with rig(nodes=[sealed_node(), target]) as fabric:
        answer = await ask(fabric)

    assert answer.status_code == 200
    assert answer.headers["x-macfabric-match"] == "exact"
    assert int(answer.headers["x-macfabric-epoch"]) > 4


async def test_new_router_recovers_from_node_reports():
    nodes = [FakeNode(f"node-{letter}") for letter in "abc"]
    async with rig(nodes=nodes) as fabric:
        texts = {f"agent-{i}": f"memory of {i} " * 50 for i in range(6)}
        before = {
            agent: (await fabric.chat(text, agent=agent)).headers["x-macfabric-node"]
            for agent, text in texts.items()
        }
    async with rig(nodes=nodes) as fabric:
        after = {agent: await fabric.chat(text, agent=agent) for agent, text in texts.items()}

    assert {agent: a.headers["x-macfabric-node"] for agent, a in after.items()} == before
    assert {a.headers["x-macfabric-match"] for a in after.values()} == {"exact"}
