"""A router that gets too little CPU ends no lease."""

import asyncio
import time

import pytest

from router.fleet.membership import LeaseState
from router.fleet.stall_watch import StallWatch
from tests.router.fake_memory import ScaledClock
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
STALL_S = 0.4  # of the loop, again and again; a lease of the rig lasts less than two of them
STALLS = 12


async def test_a_late_loop_ends_no_lease():
    async with rig(scale=10.0) as made:
        membership = made.fleet.membership
        await asyncio.sleep(0.2)  # its heartbeats have begun
        await until(lambda: all(map(membership.is_alive, made.nodes)))
        before = membership.expired_count
        for _ in range(STALLS):
            time.sleep(STALL_S)  # noqa: ASYNC251 - nothing else runs meanwhile
            await asyncio.sleep(0)
        states = [membership.health(name) for name in made.nodes]

    assert states == [LeaseState.ALIVE] * 3
    assert membership.expired_count == before


async def test_the_deadline_of_a_heartbeat_counts_only_time_in_which_the_router_ran():
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


async def test_a_node_that_is_silent_loses_its_lease_while_the_router_runs():
    async with rig(scale=20.0) as made:
        made["node-a"].does.deaf.add("describe")
        async with asyncio.timeout(30):
            while made.fleet.is_up("node-a"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
