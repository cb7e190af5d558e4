"""Kills and lost messages at every step of a move: one owner, right answers, no leftovers.

The steps are the messages of an undisturbed move, so new steps are covered automatically. Nodes
are real, and their deaths preserve their disks; see mortal_fabric.
"""

import asyncio
import itertools
import random

import pytest

from fabric.errors import FabricError, RetryLaterError
from router.fleet.node_client import NodeLostError
from router.moves.recovery import Recovery
from tests.support.mortal_fabric import SETTLE_S, WATCHING, mortal_fabric
from tests.support.samples import sample

pytestmark = pytest.mark.anyio
SECRET = "otter lantern quartz violin"
STORY = f"The vault code of Mira is {SECRET}. " + " ".join(
    f"Note {i} is {i * 7}." for i in range(60)
)
QUESTION = "The vault code of Mira is"
SAMPLE = 7
STEPS_MIN = 5  # every move has as many; fewer would mean that nothing was tested
NODE_DEATHS = [
    (moment, victim) for moment in ("before", "after") for victim in ("source", "target")
]


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Move:
    """Move of one agent from its owner to the other node."""

    def __init__(self, world, agent):
        self.world, self.agent = world, agent
        self.story = f"This is the story {agent}. {STORY}"  # shares no block with other agents
        self.first, self.source, self.target = "", "", ""
        self.base = 0
        self.router_died = False
        self.acknowledged_tokens = 0  # of a turn that was answered before recovery

    async def begin(self):
        self.first, admitted = await self.world.ask(self.agent, self.story, max_tokens=2)
        self.source = admitted.node
        self.target = next(name for name in self.world.macs if name != self.source)
        self.base = len(self.world.sent)

    async def run(self):
        """Move the agent; return the new epoch or the error's code."""
        migrations = self.world.router.moves
        try:
            receipt = await migrations.migrate("default", self.agent, self.target)
        except FabricError as error:
            return error.code
        finally:
            self.world.meddle = None
        return receipt.epoch

    @property
    def steps(self):
        return [(m.name, "source" if m.to == self.source else "target") for m in self._messages()]

    def _messages(self):
        return [m for m in self.world.sent[self.base :] if m.name not in WATCHING]

    async def kill(self, victim):
        if victim == "router":
            self.world._alive[0] = False
            self.router_died = True
        else:
            await self.world.macs[getattr(self, victim)].die()

    def at(self, index, moment, action):
        """Run `action` before or after one step."""

        async def meddle(message, carry):
            if message.index - self.base != index:
                return await carry()
            if moment == "before":
                await action()
            reply = await carry()
            if moment == "after":
                await action()
                lost = "the answer was lost"
                raise NodeLostError(lost, "mac-b")
            return reply

        self.world.meddle = meddle

    def in_mid_copy(self, victim):
        """Kill a node when the target has stored the first of several blocks."""
        loop = asyncio.get_running_loop()
        blocks = self.world.macs[self.target].node.resources.store.blocks
        adopt, mac = blocks.adopt, self.world.macs[getattr(self, victim)]

        def adopt_and_die(*arguments):
            adopt(*arguments)
            blocks.adopt = adopt
            asyncio.run_coroutine_threadsafe(mac.die(), loop)
            assert mac.copied.wait(SETTLE_S)

        blocks.adopt = adopt_and_die

    async def recover(self):
        """Restart the dead processes, and check all invariants."""
        world = self.world
        if self.router_died:
            await world.kill_router()
            await world.start_router()
        for mac in world.macs.values():
            if mac.service is None:
                await mac.start()
        await world.await_current_lives()
        if self.acknowledged_tokens:
            owner = await world.await_one_owner(self.agent)
            assert owner.tokens >= self.acknowledged_tokens, "an acknowledged turn is lost"
        await self.answers()
        owner = await world.await_one_owner(self.agent)
        for mac in world.macs.values():
            work = mac.node.moves.cleanup.abort_stale(0.0)  # as after an hour
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, mac.service._loop))
        await world.await_no_loose_blocks()
        return owner

    async def answers(self):
        """Repeat a turn until it is answered, as a client does."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                try:
                    answer, admitted = await self.world.ask(
                        self.agent, self.story, self.first, QUESTION
                    )
                except RetryLaterError:
                    await asyncio.sleep(0.1)
                else:
                    assert SECRET in answer, answer
                    views = await self.world.views(self.agent)
                    self.acknowledged_tokens = views[admitted.node].tokens
                    return


async def undisturbed(world):
    move = Move(world, "calm")
    await move.begin()
    assert await move.run() == 2
    steps = move.steps
    owner = await move.recover()
    assert owner.node == move.target
    assert len(steps) >= STEPS_MIN
    return steps


async def run_all_points(folder, deaths, *, every=1):
    """Try every point of a move; return their number, and the problems by point."""
    wrong, count = {}, 0
    async with mortal_fabric(folder, "recall", "node-a", "node-b") as world:
        steps = await undisturbed(world)
        points = list(itertools.product(range(len(steps)), deaths))
        for index, (moment, victim) in points[::every]:
            name = f"{index}-{steps[index][0]}-{moment}-{victim}"
            move = Move(world, name)
            await move.begin()
            if victim == "message":
                move.at(index, moment, _lose_reply if moment == "after" else _lose_message)
            else:
                move.at(index, moment, lambda move=move, victim=victim: move.kill(victim))
            try:
                outcome = await move.run()
                if victim in ("source", "target"):
                    await move.answers()  # while it is dead
                owner = await move.recover()
            except (AssertionError, TimeoutError) as error:
                wrong[name] = f"{error!r}; {await world.views(name)}"
                break
            count += 1
            print(f"{name}: {outcome}, then {owner.node} at {owner.epoch}")
    return count, wrong


async def _lose_reply():
    """Do nothing: only the reply is lost."""


async def _lose_message():
    message = "the message was lost"
    raise NodeLostError(message, "mac-b")


LOSSES = [(moment, what) for moment in ("before", "after") for what in ("router", "message")]


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [LOSSES, NODE_DEATHS], ids=["losses", "node deaths"])
async def test_sampled_kills_and_losses_leave_one_owner(tmp_path, deaths):
    """Every seventh point covers most steps and every kind of death."""
    count, wrong = await run_all_points(tmp_path, deaths, every=SAMPLE)

    assert wrong == {}
    assert count >= STEPS_MIN * len(deaths) // SAMPLE


@pytest.mark.nightly
@pytest.mark.parametrize("deaths", [LOSSES, NODE_DEATHS], ids=["losses", "node deaths"])
async def test_every_kill_and_loss_leaves_one_owner(tmp_path, deaths):
    count, wrong = await run_all_points(tmp_path, deaths)

    assert wrong == {}
    assert count >= STEPS_MIN * len(deaths)


@pytest.mark.parametrize("victim", sample(["source", "target"], "target"))
async def test_node_killed_during_copy_leaves_one_owner(tmp_path, victim):
    async with mortal_fabric(tmp_path, "recall", "node-a", "node-b") as world:
        move = Move(world, "alice")
        await move.begin()
        move.in_mid_copy(victim)
        outcome = await move.run()
        assert world.macs[getattr(move, victim)].service is None, "no node was killed"
        await move.recover()

    assert outcome != 2


async def test_checks_detect_missing_recovery(tmp_path, monkeypatch):
    """Without recovery, a lost release leaves a sealed agent, a lost router unreferenced blocks."""
    monkeypatch.setattr(Recovery, "resolve", lambda *_: asyncio.sleep(0))
    async with mortal_fabric(tmp_path, "recall", "node-a", "node-b") as world:
        sealed = Move(world, "sealed")
        await sealed.begin()
        sealed.at(4, "before", _lose_message)
        assert await sealed.run() == 2
        with pytest.raises(TimeoutError):
            await world.await_one_owner("sealed", 1.0)
        await world.await_no_loose_blocks(5.0)
        loose = Move(world, "loose")
        await loose.begin()
        loose.at(1, "after", lambda: loose.kill("router"))
        await loose.run()
        assert await world.await_one_owner("loose", 5.0)
        with pytest.raises(TimeoutError):
            await world.await_no_loose_blocks(1.0)


@pytest.mark.parametrize("seed", sample(range(2), 0))
async def test_duplicate_and_late_messages_change_nothing(tmp_path, seed):
    """Every message of a move arrives twice at once, and again after the move's end."""
    chance = random.Random(seed)
    async with mortal_fabric(tmp_path, "recall", "node-a", "node-b") as world:
        move = Move(world, "alice")
        await move.begin()

        async def twice(message, carry):
            first = await carry()
            return await carry() if chance.random() < 0.7 else first

        world.meddle = twice
        assert await move.run() == 2
        owner = await move.recover()
        late = world.sent[move.base :].copy()
        chance.shuffle(late)
        for message in late:
            service = world.macs[message.to].service
            await asyncio.wrap_future(service.control(message.raw))
        after = await move.recover()

    assert owner.node == after.node == move.target
    assert after.epoch == 2
