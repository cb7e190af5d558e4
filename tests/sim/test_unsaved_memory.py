"""Caches that the disk refused: freed once they are saved, or once another node owns the agent."""

import asyncio
from dataclasses import replace

import pytest

from fabric.control.node_calls import Done, ReleaseAgent
from fabric.errors import FabricError
from fabric.ids import AgentId, MigrationId, NodeName, OperationId
from fabric.record.manifest import OwnerState
from fabric.record.piece_table import PieceTable
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from tests.sim.scripted import SETTINGS, TENANT, begin, play
from tests.sim.tokenizer import render

KIB = 1 << 10
NAMES = ("alice", "bob", "carol")  # any two of them fit the memory


def turn(name, text="", epoch=1):
    return GenerateRequest(
        operation=OperationId(f"op-{name:>12}-{epoch}-{len(text)}".replace(" ", "0")),
        tenant=TENANT,
        identity=Identity(IdentityKind.AGENT, AgentId(name)),
        sampling=Sampling(max_tokens=4, ignore_eos=True),
        prompt=render(begin(name + text)),
        epoch=epoch,
    )


async def take_turn(node, name, text=""):
    """Take a turn on a node; return its last event."""
    return [event async for event in node.turns.serve(turn(name, text))][-1]


async def sample_slow_saves(world):
    """Make a disk that refused three agents save them slowly; return samples of the memory."""
    host = world.nodes["node-a"]
    node, table = host.node, host.node.resources.table
    # Only the flush below saves them.
    await world.run_on_host(host, node.background.retries.loop.stop())
    host.drive.is_full = True
    for name in NAMES:
        last = await world.run_on_host(host, take_turn(node, name))
        assert not last.durable
    assert table.hot_bytes > node.tiers.hot.limit_bytes, "unsaved agents stay, over the budget"
    host.drive.is_full, host.drive.slow_s = False, 1.0
    flushing = world.spawn_on(host, node.tiers.flusher.flush())
    seen = []
    while not flushing.done():
        waiting = [agent for agent in table if agent.cache is not None and agent.is_unsaved]
        saved = [a for a in table if a.cache is not None and not (a.is_unsaved or a.is_busy)]
        seen.append((len(waiting), len(saved), table.hot_bytes > node.tiers.hot.limit_bytes))
        await asyncio.sleep(0.01)
    return seen


def test_saved_agents_free_memory_while_others_are_being_saved():
    settings = replace(SETTINGS, hot_bytes=12 * KIB)
    seen = play(sample_slow_saves, settings=settings).result
    assert {waiting for waiting, _, _ in seen} >= {1, 2, 3}, "one after another"
    assert not any(saved and is_over for _, saved, is_over in seen)


async def cancel_early(node, request):
    """Begin a turn and hang up before anything is computed."""
    events = node.turns.serve(request)
    await anext(events)
    await events.aclose()
    await node.live_turns.quiesce()


def taken_over(*, is_saved):
    """Return a script in which another node takes over an agent whose last turn is unsaved."""

    async def script(world):
        host = world.nodes["node-a"]
        node, key = host.node, (TENANT, AgentId("alice"))
        await world.run_on_host(host, node.background.retries.loop.stop())
        if is_saved:
            assert (await world.run_on_host(host, take_turn(node, "alice"))).durable
        host.drive.is_full = True
        assert not (await world.run_on_host(host, take_turn(node, "alice", " goes on"))).durable
        host.drive.is_full = False
        agent = node.resources.table.get(key)
        before = agent.saved
        link = world.router.services.fleet.link(host.name)

        async def release(owner):
            call = ReleaseAgent(*key, 2, MigrationId("m" * 32), NodeName(owner))
            await world.run_on_host(world.router, link.call(call, Done))

        with pytest.raises(FabricError, match="no other node has it"):
            await release(host.name)
        assert agent.is_unsaved, "a release without a successor loses nothing"
        await release("node-b")
        state = agent.manifest, agent.cache, agent.is_durable
        world.disk_judge.check_tables(node)
        await world.run_on_host(host, cancel_early(node, turn("alice", epoch=3)))
        world.disk_judge.check_tables(node)
        return before, *state, len(host.caches)

    return script


@pytest.mark.parametrize("is_saved", [True, False])
def test_unsaved_agent_taken_over_keeps_its_disk_record(is_saved):
    before, record, cache, is_durable, caches_count = play(taken_over(is_saved=is_saved)).result
    assert (record.state, record.epoch, record.owner) == (OwnerState.REPLICA, 2, "node-b")
    kept = (before.text, before.pieces) if is_saved else ("", PieceTable())
    assert (record.text, record.pieces) == kept
    assert cache is None
    assert is_durable, "nothing unsaved is left"
    assert caches_count == 0
