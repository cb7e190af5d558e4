"""A free turn lock is acquired at once."""

import asyncio

import pytest

from fabric.errors import RetryLaterError
from node.agents.agent import TurnLock

pytestmark = pytest.mark.anyio


async def test_lock_is_not_free_while_a_waiter_is_about_to_get_it():
    lock = TurnLock()
    await lock.acquire()
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0)
    lock.release()
    assert lock.locked(), "its waiter did not run yet"
    assert await waiting
    lock.release()
    assert not lock.locked()


async def test_waiter_timeout_leaves_lock_free():
    lock = TurnLock()
    async with lock:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lock.acquire(), 0.001)
        assert lock.locked()
    assert not lock.locked()


async def test_free_lock_is_acquired_without_yielding():
    lock, others = TurnLock(), []
    asyncio.get_running_loop().call_soon(others.append, "came between")
    async with lock.held(1.0):
        assert not others
        assert lock.locked()
    assert not others
    assert not lock.locked()


async def test_waiting_too_long_raises_retry_later():
    lock = TurnLock()
    async with lock:
        with pytest.raises(RetryLaterError, match="it is at work") as caught:
            async with lock.held(0.001, "it is at work"):
                pytest.fail("another holder has it")
        assert caught.value.code == "agent_busy"
        assert lock.locked()
    assert not lock.locked()


@pytest.mark.parametrize("failure", [ValueError, TimeoutError, asyncio.CancelledError])
async def test_lock_is_released_when_holder_raises(failure):
    lock = TurnLock()
    with pytest.raises(failure):
        async with lock.held(1.0):
            raise failure
    assert not lock.locked()


async def test_waiter_cancelled_during_handover_passes_lock_to_next():
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
