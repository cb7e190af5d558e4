"""A free turn lock is acquired at once."""

import asyncio

import pytest

from fabric.errors import RetryLaterError
from node.agents.agent import TurnLock

pytestmark = pytest.mark.anyio


async def test_it_is_not_free_while_somebody_is_about_to_get_it():
    lock = TurnLock()
    await lock.acquire()
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0)
    lock.release()
    assert lock.locked(), "its waiter did not run yet"
    assert await waiting
    lock.release()
    assert not lock.locked()


async def test_who_gives_up_waiting_leaves_it_free():
    lock = TurnLock()
    async with lock:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lock.acquire(), 0.001)
        assert lock.locked()
    assert not lock.locked()


async def test_who_finds_it_free_holds_it_at_once():
    lock, others = TurnLock(), []
    asyncio.get_running_loop().call_soon(others.append, "came between")
    async with lock.held(1.0):
        assert not others
        assert lock.locked()
    assert not others
    assert not lock.locked()


async def test_who_waits_too_long_for_it_is_told_to_come_again():
    lock = TurnLock()
    async with lock:
        with pytest.raises(RetryLaterError, match="it is at work") as told:
            async with lock.held(0.001, "it is at work"):
                pytest.fail("somebody else has it")
        assert told.value.code == "agent_busy"
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.parametrize("failure", [ValueError, TimeoutError, asyncio.CancelledError])
async def test_it_is_let_go_of_whatever_its_holder_raises(failure):
    lock = TurnLock()
    with pytest.raises(failure):
        async with lock.held(1.0):
            raise failure
    assert not lock.locked()


async def test_who_is_cancelled_as_it_comes_to_them_leaves_it_to_the_next():
    lock, held = TurnLock(), []

    async def hold(name):
        async with lock.held(1.0):
            held.append(name)

    async with lock.held(1.0):
        first, second = asyncio.create_task(hold("first")), asyncio.create_task(hold("second"))
        await asyncio.sleep(0)
    assert lock.locked(), "its waiters did not run yet"
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled()
    assert held == ["second"]
    assert not lock.locked()
