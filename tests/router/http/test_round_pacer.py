"""Pacing of requests: a few per round of the loop, owners in turn, cancelled ones skipped."""

import asyncio

import pytest

from router.http.round_pacer import RoundPacer

pytestmark = pytest.mark.anyio
PER_ROUND = 4


async def test_few_requests_pass_in_a_round_however_many_come():
    pacer, rounds, passed = RoundPacer(PER_ROUND), [0], []

    async def pass_one(number):
        await pacer.wait("a")
        passed.append(rounds[0])

    tasks = [asyncio.create_task(pass_one(number)) for number in range(50)]
    while not all(task.done() for task in tasks):
        rounds[0] += 1
        await asyncio.sleep(0)
    assert max(passed.count(number) for number in passed) <= PER_ROUND
    assert len(passed) == 50


async def test_an_owner_does_not_wait_for_the_flood_of_another():
    pacer, passed = RoundPacer(PER_ROUND), []

    async def pass_one(owner):
        await pacer.wait(owner)
        passed.append(owner)

    tasks = [asyncio.create_task(pass_one("flood")) for _ in range(100)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(pass_one("other")))
    await asyncio.gather(*tasks)
    assert passed.index("other") <= 3 * PER_ROUND


async def test_cancelled_requests_do_not_hold_up_others():
    pacer = RoundPacer(PER_ROUND)
    tasks = [asyncio.create_task(pacer.wait("a")) for _ in range(40)]
    await asyncio.sleep(0)
    for task in tasks[1::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(result is None for result in results) >= 20
    await asyncio.wait_for(pacer.wait("a"), 60)
