"""Turns that arrive before their agent's move."""

import asyncio

import pytest

from fabric.errors import RetryElsewhereError
from fabric.ids import MigrationId
from node.migration.incoming import IncomingMoves
from tests.node.fake_engine import FakeClock

pytestmark = pytest.mark.anyio
MOVE = MigrationId("mig-1")


async def test_decision_wakes_all_waiters_of_its_move():
    moves = IncomingMoves(FakeClock())
    waiting = [asyncio.create_task(moves.wait_until_decided(MOVE)) for _ in range(2)]
    other = asyncio.create_task(moves.wait_until_decided(MigrationId("mig-2")))
    await asyncio.sleep(0)
    moves.notify_decided(MOVE)
    await asyncio.gather(*waiting)
    assert not other.done()
    moves.notify_decided(MigrationId("mig-2"))
    await other
    assert moves.waiting_count == 0
    assert list(moves) == []


async def test_decision_without_waiters_is_not_kept():
    moves = IncomingMoves(FakeClock())
    moves.notify_decided(MOVE)
    waiting = asyncio.create_task(moves.wait_until_decided(MOVE))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "callers check for a decision before they wait"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert moves.waiting_count == 0
    assert list(moves) == []


async def test_wait_for_a_decision_is_bounded(monkeypatch):
    monkeypatch.setattr("node.migration.incoming.HANDOVER_WAIT_S", 0.01)
    moves = IncomingMoves(FakeClock())
    with pytest.raises(RetryElsewhereError, match="not arrived"):
        await moves.wait_until_decided(MOVE)
    assert moves.waiting_count == 0
    assert list(moves) == []
