"""A turn lock: who finds it free has it at once."""

import asyncio

import pytest

from node.agents.turn_lock import TurnLock

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
