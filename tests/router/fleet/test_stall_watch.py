"""A router that gets too little CPU ends no lease."""

import asyncio
import time

import pytest

from router.fleet.membership import LeaseState
from router.fleet.stall_watch import StallWatch
from tests.router.rig import rig, until
from tests.support.clocks import ScaledClock

pytestmark = pytest.mark.anyio
STALL_S = 0.4  # repeated; a lease of the rig lasts less than two stalls
STALLS = 12


async def test_stalled_loop_expires_no_lease():
    async with rig(scale=10.0) as fabric:
        membership = fabric.fleet.membership
        await asyncio.sleep(0.2)  # heartbeats have begun
        await until(lambda: all(map(membership.is_alive, fabric.nodes)))
        before = membership.expired_count
        for _ in range(STALLS):
            time.sleep(STALL_S)  # noqa: ASYNC251 - nothing else runs meanwhile
            await asyncio.sleep(0)
        states = [membership.health(name) for name in fabric.nodes]

    assert states == [LeaseState.ALIVE] * 3
    assert membership.expired_count == before


async def test_heartbeat_deadline_excludes_loop_stalls():
    watch = StallWatch(ScaledClock(1.0), lambda _: None)
    ticking = asyncio.create_task(watch.run(0.2))
    await asyncio.sleep(0)
    async with watch.patience(0.5):
        for _ in range(4):
            time.sleep(0.35)  # noqa: ASYNC251
            await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with watch.patience(0.1):
            await asyncio.sleep(30)
    ticking.cancel()


async def test_silent_node_loses_lease_while_router_runs():
    async with rig(scale=20.0) as fabric:
        fabric["node-a"].behaviour.dropped_calls.add("describe")
        async with asyncio.timeout(30):
            while fabric.fleet.is_up("node-a"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
