"""Bugs that random lives have found, each as a script."""

import asyncio

import pytest

from fabric.control.node_calls import AbortMigration, Done
from fabric.ids import AgentId, MigrationId, OperationId
from fabric.record.manifest import OwnerState
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from router.limits import LEASE_S
from tests.sim.router_host import ROUTER
from tests.sim.scripted import TENANT, begin, play
from tests.sim.tokenizer import render

ALICE, BOB = (TENANT, AgentId("alice")), (TENANT, AgentId("bob"))


async def turns_cancelled_at_every_moment(world):
    node = world.nodes["node-a"].node

    async def hang_up(number):
        request = GenerateRequest(
            operation=OperationId(f"op-{number:012}"),
            tenant=TENANT,
            identity=Identity(IdentityKind.AGENT, AgentId(f"agent-{number}")),
            sampling=Sampling(max_tokens=4, ignore_eos=True),
            prompt=render(begin(f"number {number}")),
            epoch=1,
        )
        events = node.turns.serve(request)
        await anext(events)
        await asyncio.sleep(0.01 * number)
        await events.aclose()
        await node.live_turns.quiesce()

    for number in range(60):
        await world.run_on_host(world.nodes["node-a"], hang_up(number))
    return node.resources.store.blocks._index._pins


def test_turn_cancelled_at_any_moment_leaves_no_block_pinned():
    world = play(turns_cancelled_at_every_moment, kind="recurrent")
    assert not world.result


async def erased_while_its_disk_refuses(world):
    admitted, _, _ = await world.ask("alice", begin("zebra"))
    owner = world.nodes[admitted.node]
    owner.drive.is_sticky = True
    erasure = await world.erase("alice")
    assert erasure.unreachable == (owner.name,)
    for way in ((owner.name, ROUTER), (ROUTER, owner.name)):
        world.network.cut(*way)
    await asyncio.sleep(LEASE_S + 2.0)
    admitted, _, _ = await world.ask("alice", begin("giraffe"))
    assert admitted.node != owner.name
    for way in ((owner.name, ROUTER), (ROUTER, owner.name)):
        world.network.cut(*way, change=-1)
    await asyncio.sleep(10.0)  # the former owner steps down as far as its disk allows
    owner.drive.is_sticky = False
    await asyncio.sleep(60.0)
    return world.words_on(owner, "zebra")


def test_agent_on_a_refusing_disk_is_erased_by_its_tombstone():
    assert play(erased_while_its_disk_refuses).result == []


async def move(world, key, target):
    await world.move(key[1], target)


async def replicate(world, key, target):
    work = world.router.services.replicas.replicate(key, target, kept=True)
    await world.run_on_host(world.router, work)


async def abort(world, key, target):
    link = world.router.services.fleet.link(target)
    await world.run_on_host(
        world.router, link.call(AbortMigration(*key, MigrationId("m" * 32)), Done)
    )


@pytest.mark.parametrize("action", [move, replicate, abort])
def test_commit_waiting_for_its_agent_does_not_block_others(action):
    """Alice's move waits for her turn at the target; Bob's calls are served meanwhile."""

    async def script(world):
        admitted, _, _ = await world.ask("alice", begin("zebra"))
        target = next(name for name in world.nodes if name != admitted.node)
        await world.ask("bob", begin("giraffe"))
        if world.router.services.fleet.directory.owner(BOB).node == target:
            await world.move("bob", admitted.node)
        await replicate(world, ALICE, target)
        node = world.nodes[target].node
        agent = node.resources.table.get(ALICE)
        async with agent.turn_lock:
            moving = asyncio.create_task(world.move("alice", target))
            while not node.moves.incoming.decision_lock(ALICE).locked():  # noqa: ASYNC110 - simulated time
                await asyncio.sleep(0.01)
            await action(world, BOB, target)
            assert node.moves.incoming.decision_lock(ALICE).locked(), "the move is not decided yet"
            assert not moving.done()
        await moving
        assert agent.manifest.state is OwnerState.OWNED

    play(script)
