"""An idle agent with one lost or damaged block supports every operation."""

import asyncio
from unittest import mock

import pytest

from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.directive_calls import DirectAgent
from fabric.control.hibernation_calls import Hibernate
from fabric.control.node_calls import AgentView, Done, Flush, PinAgent
from fabric.edit_mode import EditMode
from fabric.errors import ConflictError, FabricError
from fabric.ids import AgentId, OperationId
from fabric.record.directive import Directive
from fabric.record.message_positions import message_digest
from fabric.settings import NodeSettings
from fabric.turn.messages import Message, MessageRole
from node.store.block_files import file_name
from tests.sim.script import TENANT, Talk, play, retry, run_on_host

MIB = 1 << 20
SETTINGS = NodeSettings(hot_bytes=MIB, disk_bytes=64 * MIB)
ALICE, IVAN = AgentId("alice"), AgentId("ivan")
KEY = TENANT, ALICE


class Case:
    """Alice, idle at `source`, with a lost block."""

    def __init__(self, world):
        self.world = world
        self.alice = Talk(world, ALICE, "you are alice " * 30)

    @property
    def services(self):
        return self.world.router.services

    async def begin(self, *, hot, found, at=1):
        await self.alice.say("one")
        assert await self.alice.say("two")
        self.host = self.world.nodes[self.alice.last.node]
        self.target = min(self.world.nodes.keys() - {self.host.name})
        await run_on_host(self.world, self.host, self._evict_and_lose(at, hot=hot, found=found))

    async def _evict_and_lose(self, at, *, hot, found):
        if not hot:
            await self.host._calls.answer(encode_call(Flush(drop_hot=True)))
        assert (self.host.node.resources.table.get(KEY).cache is not None) == hot
        self.lose(at, found=found)

    def lose(self, at, *, found):
        agent, drive = self.host.node.resources.table.get(KEY), self.host.drive
        name = file_name(agent.saved.pieces[at].block)
        raw = drive.files[name]
        drive.files[name] = raw[:-1] + bytes([raw[-1] ^ 1])
        drive.damaged.add(name)
        drive.hurt.add(name)
        if found:
            assert len(self.host.node.resources.store.blocks.scrub(1 << 40).damaged) == 1

    async def call(self, message, kind):
        answer = await run_on_host(
            self.world, self.host, self.host._calls.answer(encode_call(message))
        )
        reply = decode_reply(kind, answer)
        assert not isinstance(reply, ErrorReply), reply
        return reply


async def move(case):
    receipt = await retry(lambda: case.services.moves.migrate(*KEY, case.target))
    assert receipt.target == case.target
    await case.alice.say("and now")
    assert case.alice.last.node == case.target


async def move_live(case):
    talking = asyncio.create_task(case.alice.say("a long one", max_tokens=100))
    await asyncio.sleep(1.0)
    await retry(lambda: case.services.moves.migrate(*KEY, case.target))
    await talking


async def drain(case):
    drain_status = await case.services.drains.start(case.host.name)
    async with asyncio.timeout(60.0):
        while drain_status.left_count:  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(1.0)
    assert not drain_status.stuck


async def replicate(case):
    await case.services.replicas.replicate(KEY, case.target, kept=True)
    assert case.world.nodes[case.target].node.resources.table.get(KEY) is not None


async def fork(case, to=None):
    name = OperationId("operation-1")
    await case.services.forks.fork(KEY, IVAN, to or case.target, name)
    ivan = Talk(case.world, IVAN, case.alice.messages[0]["content"])
    ivan.messages = list(case.alice.messages)
    await ivan.say("and now")


async def fork_here(case):
    await fork(case, case.host.name)


async def pin(case):
    assert (await case.call(PinAgent(TENANT, ALICE, pinned=True), AgentView)).pinned
    assert case.host.node.resources.table.get(KEY).saved.pinned
    assert (await case.call(PinAgent(TENANT, ALICE, pinned=False), AgentView)).pinned is False


async def direct(case):
    digest = message_digest(Message(MessageRole.USER, ("one",)))
    named = OperationId("operation-1")
    added = Directive(named, EditMode.FORGET, "two", None, digest)
    view = await case.call(DirectAgent(TENANT, ALICE, (added,)), AgentView)
    assert [each.operation for each in view.directives] == [named]
    assert not (await case.call(DirectAgent(TENANT, ALICE, (), (named,)), AgentView)).directives


async def flush(case):
    assert "1 agents are durable" in (await case.call(Flush(), Done)).detail


ACTIONS = {
    "move": move,
    "move in mid-turn": move_live,
    "drain": drain,
    "replicate": replicate,
    "fork": fork,
    "fork here": fork_here,
    "pin": pin,
    "direct": direct,
    "flush": flush,
}


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "cold"])
@pytest.mark.parametrize("found", [True, False], ids=["lost", "damaged"])
@pytest.mark.parametrize("action", ACTIONS)
def test_agent_with_a_lost_block_supports_every_action(action, found, hot):
    async def live(world):
        case = Case(world)
        await case.begin(hot=hot, found=found)
        await ACTIONS[action](case)
        durable_tokens = case.alice.durable_tokens
        assert await case.alice.say("in the end")
        if hot and action != "fork here":
            # The hot cache had all: blocks lost on the drive were saved again, or not needed.
            assert case.alice.last.cached_tokens >= durable_tokens - 1
        assert not case.services.fleet.directory.undecided_agents()

    play(live, SETTINGS)


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "cold"])
@pytest.mark.parametrize("action", ["move", "drain", "pin", "direct"])
def test_block_lost_while_a_record_is_written_blocks_no_action(action, hot):
    """A block is lost already; another is lost between the check of blocks and the write."""

    async def live(world):
        case = Case(world)
        await case.begin(hot=hot, found=True)
        store = case.host.node.resources.store
        publish, losses = store.publish, [0]

        def losing(record, previous):
            if losses and previous is not None and previous.key == KEY:
                case.lose(losses.pop(), found=True)
            publish(record, previous)

        with mock.patch.object(store, "publish", losing):
            await ACTIONS[action](case)
        assert not losses
        assert await case.alice.say("in the end")

    play(live, SETTINGS)


@pytest.mark.parametrize("hot", [True, False], ids=["hot", "cold"])
def test_hibernation_file_is_complete_or_refused(hot):
    async def live(world):
        case = Case(world)
        await case.begin(hot=hot, found=True)
        export = case.host.node.moves.exports.begin(Hibernate(TENANT, ALICE, 1))

        async def written():
            try:
                await export.open()
                return b"".join([piece async for piece in export.chunks()])
            finally:
                await export.close()

        if hot:
            assert await run_on_host(world, case.host, written())
        else:
            with pytest.raises(FabricError) as error:
                await run_on_host(world, case.host, written())
            assert (error.value.status, error.value.code) == (409, "blocks_missing")

    play(live, SETTINGS)


def test_truncated_agent_keeps_the_prefix_before_the_loss():
    async def live(world):
        case = Case(world)
        await case.begin(hot=False, found=True)
        await move(case)
        assert case.alice.last.cached_tokens >= 256 - 1

    play(live, SETTINGS)


@pytest.mark.parametrize("action", ["move", "drain", "pin"])
def test_agent_without_any_block_left_stays_usable(action):
    async def live(world):
        case = Case(world)
        await case.begin(hot=False, found=True, at=0)
        await ACTIONS[action](case)
        assert await case.alice.say("in the end")

    play(live, SETTINGS)


@pytest.mark.parametrize("when", ["at a turn's end", "at the seal"])
def test_pin_requested_while_a_record_is_written_persists(when):
    """The next record has the pin, on whichever node it is written."""

    async def live(world):
        alice = Talk(world, ALICE, "you are alice " * 30)
        await alice.say("one")
        host = world.nodes[alice.last.node]
        target = min(world.nodes.keys() - {host.name})
        store = host.node.resources.store
        publish, pin_calls = store.publish, []

        def pinning(record, previous):
            if not pin_calls:
                call = encode_call(PinAgent(TENANT, ALICE, pinned=True))
                pin_calls.append(world.loop.spawn(host.process, host._calls.answer(call)))
                world.loop.extra_s += 1.0  # the disk takes its time
            publish(record, previous)

        store.publish = pinning
        if when == "at the seal":
            await retry(lambda: world.router.services.moves.migrate(*KEY, target))
            host = world.nodes[target]
        else:
            await alice.say("two")
        await asyncio.wait(pin_calls)
        pin_reply = decode_reply(AgentView, pin_calls[0].result())
        if isinstance(pin_reply, ErrorReply):
            assert (when, pin_reply.status) == ("at the seal", 503)
        await asyncio.sleep(70.0)
        assert host.node.resources.table.get(KEY).saved.pinned

    play(live, SETTINGS)


@pytest.mark.parametrize("is_full", [True, False])
def test_unsaved_turn_migrates_once_the_disk_accepts_it(is_full):
    async def live(world):
        alice = Talk(world, ALICE, "you are alice " * 30)
        for name in ("node-b", "node-c"):
            world.nodes[name].node.health.is_draining = True
        host = world.nodes["node-a"]
        host.drive.is_full = is_full
        assert await alice.say("one") != is_full
        world.nodes["node-b"].node.health.is_draining = False
        talking = asyncio.create_task(alice.say("a long one", max_tokens=100))
        await asyncio.sleep(1.0)
        moving = world.router.services.moves.migrate(*KEY, "node-b")
        if is_full:
            with pytest.raises(FabricError, match="in memory only") as error:
                await moving
            assert error.value.status == 507
        else:
            await moving
        await talking
        host.drive.is_full = False

    play(live, SETTINGS)


@pytest.mark.parametrize("action", ["replicate", "fork"])
def test_agent_without_blocks_cannot_be_copied(action):
    async def live(world):
        case = Case(world)
        await case.begin(hot=False, found=True, at=0)
        with pytest.raises(ConflictError, match="nothing of the agent is on disk"):
            await ACTIONS[action](case)

    play(live, SETTINGS)
