"""A released owner whose disk does not store the release at once."""

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest

from fabric.control.hibernation_calls import Hibernate, Resume
from fabric.control.node_calls import CommitMigration, OfferMigration, ReleaseAgent, SealAgent
from fabric.errors import RetryLaterError
from fabric.ids import AgentId, MigrationId, NodeName
from fabric.kvcache.hashing import agent_digest
from fabric.limits import HEARTBEAT_S
from fabric.record.manifest import OwnerState, decode_manifest
from fabric.turn.generation import Identity, IdentityKind
from node.agents.agent import Agent
from node.limits import FLUSH_IDLE_S
from node.migration.ownership import OwnershipReleases
from tests.sim.node_host import CLUSTER_KEY
from tests.sim.script import failing_in_place, full_for_records, refusal_of, retry
from tests.sim.scripted import TENANT, begin, play
from tests.sim.test_erasure_races import until

ALICE = (TENANT, AgentId("alice"))
RECORD = f"manifests/{agent_digest(CLUSTER_KEY, *ALICE)}.mf"
MOVE = MigrationId("m" * 32)


def continue_conversation(text, messages=None):
    """Return a conversation, by default the first one, with its answer and a question."""
    answer = {"role": "assistant", "content": text}
    return [*(messages or begin("zebra")), answer, {"role": "user", "content": "And?"}]


async def leave_move_undecided(world):
    """Leave a move undecided, and make the source's disk refuse the release."""
    admitted, text, _ = await world.ask("alice", begin("zebra"))
    source = world.nodes[admitted.node]
    target = next(host for host in world.nodes.values() if host is not source)
    agent = source.node.resources.table.get(ALICE)
    with failing_in_place(target.drive, RECORD, permanent=True):
        moving = asyncio.create_task(refusal_of(world.move("alice", target.name)))
        await until(lambda: agent.manifest.state is OwnerState.SEALED)
        with full_for_records(source.drive):
            error = await moving
    assert error.code == "undecided"
    assert stored_record(source).state is OwnerState.SEALED
    return source, continue_conversation(text)


async def release_elsewhere(world):
    """Release Alice, while her disk refuses records, to a node that does not have her.

    That node stands for one that was lost since, or has evicted her.
    """
    admitted, text, _ = await world.ask("alice", begin("zebra"))
    source = world.nodes[admitted.node]
    other = next(name for name in world.nodes if name != source.name)
    with full_for_records(source.drive):
        call = ReleaseAgent(TENANT, admitted.agent, admitted.epoch + 4, MOVE, NodeName(other))
        assert await refusal_of(world.run_on_host(source, source.node.moves.source.release(call)))
    return source, continue_conversation(text)


async def restart(world):
    world.router.kill()
    await until(lambda: world.router.is_serving)


async def keep_router(world):
    """Keep the router that issued the epoch."""


def stored_record(host):
    return decode_manifest(host.drive.files[RECORD])


@pytest.mark.parametrize("event", [keep_router, restart])
@pytest.mark.parametrize("wait_s", [0.0, 3 * HEARTBEAT_S, 2 * FLUSH_IDLE_S])
@pytest.mark.parametrize("setup", [leave_move_undecided, release_elsewhere])
def test_next_turn_is_served_by_the_node_with_the_cache(setup, event, wait_s):
    async def script(world):
        source, messages = await setup(world)
        await event(world)
        await asyncio.sleep(wait_s)
        admitted, _, finished = await retry(lambda: world.ask("alice", messages))
        assert admitted.node == source.name
        assert admitted.cached_tokens > len("zebra")
        assert finished.durable

    play(script)


@pytest.mark.parametrize("setup", [leave_move_undecided, release_elsewhere])
def test_turn_is_served_while_the_disk_refuses_the_release(setup):
    async def script(world):
        source, messages = await setup(world)
        with full_for_records(source.drive):
            await asyncio.sleep(3 * FLUSH_IDLE_S)
            admitted, _, finished = await retry(lambda: world.ask("alice", messages))
        assert (admitted.node, finished.durable) == (source.name, False)
        await asyncio.sleep(2 * FLUSH_IDLE_S)
        assert stored_record(source).epoch == admitted.epoch

    play(script)


@pytest.mark.parametrize("setup", [leave_move_undecided, release_elsewhere])
def test_refused_release_is_written_later(setup):
    async def script(world):
        source, _ = await setup(world)
        agent = source.node.resources.table.get(ALICE)
        messages = agent.view()
        await asyncio.sleep(2 * FLUSH_IDLE_S)
        record = stored_record(source)
        assert (record.state, record.epoch, record.owner) == (
            messages.state,
            messages.epoch,
            messages.node,
        )
        assert messages.state is OwnerState.REPLICA
        assert agent.successor is None

    play(script)


def test_unnamed_conversation_continues_after_release():
    async def script(world):
        turn = world.turn

        def unnamed(_, messages, max_tokens):
            return replace(turn("", messages, max_tokens), identity=Identity(IdentityKind.CONTENT))

        with mock.patch.object(world, "turn", unnamed):
            _, messages = await release_elsewhere(world)
            for _ in range(3):
                _, text, finished = await retry(lambda messages=messages: world.ask("", messages))
                assert finished.durable
                messages = continue_conversation(text, messages)

    play(script)


async def migrate_back(world, source, other):
    """Migrate Alice to `source` from another node, at an epoch below the released one."""
    offer = OfferMigration(*ALICE, 3, MOVE, source.name)
    offered = await world.run_on_host(other, other.node.moves.source.offer(offer))
    final = CommitMigration(MOVE, other.name, offered, 4)
    return await refusal_of(world.run_on_host(source, source.node.moves.target.commit(final)))


async def import_file(world, source, other):
    """Import a hibernation file of Alice at `source`."""
    export = other.node.moves.exports.begin(Hibernate(*ALICE, 3))

    async def written():
        await export.open()
        raw = b"".join([piece async for piece in export.chunks()])
        await export.close()
        return raw

    raw = await world.run_on_host(other, written())

    async def read():
        arriving = source.node.moves.imports.begin(Resume(*ALICE, 4, replace=True))
        arriving.feed(raw)
        arriving.finish()
        await arriving.commit()

    return await refusal_of(world.run_on_host(source, read()))


@pytest.mark.parametrize("action", [migrate_back, import_file])
def test_released_node_rejects_ownership_below_its_fence(action):
    """All turns of an agent that is owned below the fence would be refused permanently."""

    async def script(world):
        source, messages = await release_elsewhere(world)
        other = world.nodes[source.node.resources.table.get(ALICE).view().node]
        request = replace(world.turn("alice", messages).request(3, lambda _: 0))

        async def take_over():
            return [event async for event in other.node.turns.serve(request)]

        await world.run_on_host(other, take_over())
        error = await action(world, source, other)
        assert error.code == "stale_epoch"
        assert source.node.resources.table.get(ALICE).view().epoch == 5

    play(script)


def test_seal_finished_after_the_release_blocks_no_turn():
    """A new router releases the agent while the old router's call still seals it."""

    async def script(world):
        admitted, text, _ = await world.ask("alice", begin("zebra"))
        source = world.nodes[admitted.node]
        other = next(name for name in world.nodes if name != source.name)
        agent = source.node.resources.table.get(ALICE)
        world.loop.start_worker = world._start_worker
        source.drive.slow_s = 1.0
        seal = SealAgent(*ALICE, 1, MOVE, NodeName(other))
        sealing = world.spawn_on(source, source.node.moves.source.seal(seal))
        await until(agent.turn_lock.locked)
        release = ReleaseAgent(*ALICE, 2, MOVE, NodeName(source.name))
        await world.run_on_host(source, source.node.moves.source.release(release))
        assert sealing.done()
        source.drive.slow_s = 0.0
        await asyncio.sleep(2 * HEARTBEAT_S)
        await world.ask("alice", continue_conversation(text))

    play(script)


@contextmanager
def nodes_list_stored_records():
    """Planted fault: lists omit an unwritten release, which is never written by itself."""
    view = Agent.view

    def view_by_record(self):
        with mock.patch.object(Agent, "effective_record", property(lambda self: self.manifest)):
            return view(self)

    async def release_nothing(self):
        return None

    with (
        mock.patch.object(Agent, "view", view_by_record),
        mock.patch.object(OwnershipReleases, "finish_all", release_nothing),
    ):
        yield


@pytest.mark.parametrize("setup", [leave_move_undecided, release_elsewhere])
@pytest.mark.parametrize("event", [keep_router, restart])
def test_listing_an_unreleased_record_is_detected(setup, event):
    with nodes_list_stored_records(), pytest.raises(RetryLaterError, match="being decided"):
        test_next_turn_is_served_by_the_node_with_the_cache(setup, event, HEARTBEAT_S)
