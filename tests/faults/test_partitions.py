"""Acknowledgements of a node whose heartbeats are lost while its streams still arrive.

Control calls use Ray and tokens use HTTP, so either may be cut without the other.
"""

import asyncio

import pytest

from fabric.errors import RetryElsewhereError, RetryLaterError, StaleEpochError
from fabric.record.manifest import OwnerState
from router.fleet.membership import LeaseState
from tests.support.mortal_fabric import SETTLE_S, mortal_fabric
from tests.support.samples import sample

pytestmark = pytest.mark.anyio
SECRET = "otter lantern quartz violin"
STORY = f"The vault code of Mira is {SECRET}. " + " ".join(
    f"Note {i} is {i * 7}." for i in range(60)
)
QUESTION = "The vault code of Mira is"
LONG = {"max_tokens": 8_000, "ignore_eos": True}  # longer than any lease


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def wait_until(condition):
    async with asyncio.timeout(SETTLE_S):
        while not condition():  # noqa: ASYNC110 - leases expire by the clock alone
            await asyncio.sleep(0.01)


def metric(world, name):
    lines = world.router.telemetry.exposition(world.router.fleet.membership).decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def start_long_answer(world):
    """Create an agent and stream a long answer; return its first answer, node and task."""
    first, admitted = await world.ask("alice", STORY, max_tokens=2)
    streaming = asyncio.Event()
    slow = asyncio.create_task(
        world.ask("alice", STORY, first, "go on", on_event=streaming.set, **LONG)
    )
    await asyncio.wait_for(streaming.wait(), SETTLE_S)
    return first, admitted.node, slow


@pytest.mark.parametrize(
    "lost", sample(["requests_lost_to", "replies_lost_from"], "replies_lost_from")
)
async def test_turn_on_a_node_that_lost_ownership_is_not_acknowledged(tmp_path, lost):
    async with mortal_fabric(tmp_path, "recall", "node-a", "node-b") as world:
        first, old, slow = await start_long_answer(world)
        getattr(world, lost).add(old)
        await wait_until(lambda: world.router.fleet.membership.health(old) is LeaseState.EXPIRED)
        answer, admitted = await world.ask("alice", STORY, first, QUESTION)
        getattr(world, lost).clear()
        with pytest.raises(RetryLaterError):
            await slow
        await wait_until(lambda: world.router.fleet.membership.health(old) is LeaseState.ALIVE)
        owner = await world.await_one_owner("alice")
        views = await world.views("alice")
        after, last = await world.ask("alice", STORY, first, QUESTION, answer, QUESTION)
        await world.await_no_loose_blocks()

    assert SECRET in answer
    assert SECRET in after
    assert admitted.node == owner.node == last.node != old
    assert (admitted.epoch, owner.epoch, last.epoch) == (2, 2, 2)
    assert views[old].state is OwnerState.REPLICA


async def test_turns_are_rejected_by_a_node_whose_agent_was_taken_over(tmp_path):
    async with mortal_fabric(tmp_path, "recall", "node-a", "node-b") as world:
        first, admitted = await world.ask("alice", STORY, max_tokens=2)
        old = admitted.node
        world.requests_lost_to.add(old)
        await wait_until(lambda: world.router.fleet.membership.health(old) is LeaseState.EXPIRED)
        await world.ask("alice", STORY, first, QUESTION)
        late_link = world.router.fleet.link(old)
        world.requests_lost_to.clear()
        await world.await_one_owner("alice")
        codes = []
        for epoch in (0, 1):
            turn = world.turn("alice", STORY, first, QUESTION)
            with pytest.raises(RetryElsewhereError) as caught:
                await anext(late_link.generate(turn.request(epoch)))
            codes.append(caught.value.code)
        views = await world.views("alice")

    # Epoch 0 is a turn identified by its content: any epoch would do, but not a replica's.
    assert codes == [RetryElsewhereError.code, StaleEpochError.code]
    assert views[old].state is OwnerState.REPLICA


async def test_suspended_router_expires_no_lease(tmp_path, monkeypatch):
    """The router's machine sleeps and wakes: that time does not count for any lease."""
    async with mortal_fabric(tmp_path, "recall", "node-a", "node-b", scale=1.0) as world:
        first, admitted = await world.ask("alice", STORY, max_tokens=2)
        fleet = world.router.fleet
        await wait_until(lambda: fleet.membership._stalls._ticked is not None)
        began_s = fleet.clock.monotonic_s
        monkeypatch.setattr(
            type(fleet.clock), "monotonic_s", lambda clock, now_s=began_s: now_s() + 1_000.0
        )
        health = [fleet.membership.health(name) for name in world.macs]
        _, after = await world.ask("alice", STORY, first, QUESTION)
        expired = metric(world, "macfabric_expired_leases_total")

    assert LeaseState.EXPIRED not in health
    assert (after.node, after.epoch) == (admitted.node, 1)
    assert expired == 0
