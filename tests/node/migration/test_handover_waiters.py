"""Turns that come ahead of their agent's move."""

import asyncio

import pytest

from fabric.errors import RetryElsewhereError
from fabric.ids import MigrationId
from node.migration.handover_waiters import Landings

pytestmark = pytest.mark.anyio
MOVE = MigrationId("mig-1")


async def test_everyone_who_waits_is_woken_once_their_move_is_decided():
    landings = Landings()
    waiting = [asyncio.create_task(landings.wait(MOVE)) for _ in range(2)]
    other = asyncio.create_task(landings.wait(MigrationId("mig-2")))
    await asyncio.sleep(0)
    landings.note(MOVE)
    await asyncio.gather(*waiting)
    assert not other.done()
    landings.note(MigrationId("mig-2"))
    await other
    assert landings.waiting_count == 0


async def test_a_decision_that_nobody_waits_for_is_not_kept():
    landings = Landings()
    landings.note(MOVE)
    waiting = asyncio.create_task(landings.wait(MOVE))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "who asks has looked before whether it is decided"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert landings.waiting_count == 0


async def test_a_move_that_is_never_decided_is_waited_for_only_so_long(monkeypatch):
    monkeypatch.setattr("node.migration.handover_waiters.LANDING_WAIT_S", 0.01)
    landings = Landings()
    with pytest.raises(RetryElsewhereError, match="not arrived"):
        await landings.wait(MOVE)
    assert landings.waiting_count == 0
