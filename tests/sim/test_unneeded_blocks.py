"""A drive that removes nothing: unneeded blocks stay, and no agent is affected."""

import asyncio

import pytest

from fabric.control.calls import encode_call
from fabric.control.hibernation_calls import Hibernate, Resume
from fabric.control.node_calls import Flush, PrefetchAgent
from fabric.ids import AgentId
from fabric.record.manifest import OwnerState
from node.limits import FLUSH_IDLE_S
from tests.sim.scripted import TENANT, begin, play

ALICE, BOB = AgentId("alice"), AgentId("bob")
TOKENS = list(range(40))


def store_unused_block(node):
    """Store a block that no record uses."""
    (span,) = node.resources.store.spans(TENANT, TOKENS)
    kv = memoryview(bytearray(node.resources.identity.spec.kv_bytes(len(TOKENS))))
    node.resources.store.blocks.abandon([node.resources.store.save_block(span, TOKENS, kv)])


async def hibernation_file(node, epoch):
    export = node.moves.exports.begin(Hibernate(TENANT, ALICE, epoch))
    await export.open()
    raw = b"".join([piece async for piece in export.chunks()])
    await export.close()
    return raw


async def hibernate(node, epoch, raw):
    assert len(await hibernation_file(node, epoch)) == len(raw)


async def resume(node, epoch, raw):
    arriving = node.moves.imports.begin(Resume(TENANT, BOB, epoch))
    arriving.feed(raw)
    arriving.finish()
    await arriving.commit()
    arriving.abandon()
    assert node.resources.table.get((TENANT, BOB)).manifest.state is OwnerState.OWNED


async def prefetch(node, epoch, raw):
    view = await node.tiers.prefetches.answer(PrefetchAgent(TENANT, ALICE, epoch))
    assert "hot" in view.tiers


@pytest.mark.parametrize("action", [hibernate, resume, prefetch])
def test_action_succeeds_when_unneeded_blocks_cannot_be_removed(action):
    async def script(world):
        admitted, _, _ = await world.ask(ALICE, begin("zebra"))
        host = world.nodes[admitted.node]

        async def work():
            raw = await hibernation_file(host.node, admitted.epoch)
            await host._calls.answer(encode_call(Flush(drop_hot=True)))
            store_unused_block(host.node)
            stored = len(host.drive.files)
            host.drive.is_sticky = True
            await action(host.node, admitted.epoch, raw)
            host.drive.is_sticky = False
            host.node.resources.store.sweep()
            return stored

        stored = await world.run_on_host(host, work())
        files_count = len(host.drive.files) - (action is resume)  # of its record
        assert files_count == stored - 1, "a later sweep removes the block"

    play(script)


def test_blocks_of_an_abandoned_turn_are_removed():
    async def script(world):
        admitted, _, _ = await world.ask(ALICE, begin("zebra"))
        host = world.nodes[admitted.node]
        before = set(host.drive.files)
        store_unused_block(host.node)
        assert set(host.drive.files) > before
        await asyncio.sleep(FLUSH_IDLE_S + 1.0)
        assert set(host.drive.files) == before

    play(script)
