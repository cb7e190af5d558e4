"""A turn that uses borrowed rows when their lender is erased."""

import asyncio
from dataclasses import replace

from fabric.edit_mode import EditMode
from fabric.errors import RetryLaterError
from fabric.ids import AgentId
from fabric.turn.generation import MatchKind
from tests.sim.script import refusal_of, retry
from tests.sim.scripted import FILLER, TENANT, begin, play
from tests.sim.test_erasure_races import until

BOB = (TENANT, AgentId("bob"))
READS = [
    {"role": "system", "content": "You read what others read."},
    {"role": "user", "content": FILLER},
]


async def read(world, max_tokens=8):
    """Take a turn of bob, who borrows rows; return its admission."""
    turn = replace(world.turn("bob", READS, max_tokens), edits=EditMode.ANYWHERE)

    async def ask():
        opened = await world.router.services.turns.open(turn)
        try:
            async for _ in opened.events():
                pass
        finally:
            await opened.close()
        return opened.admitted

    return await world.run_on_host(world.router, ask())


async def erased_under_a_borrower(world):
    services, host = world.router.services, world.nodes["node-c"]
    for name in ("node-a", "node-b"):
        await world.run_on_host(world.router, services.drains.start(name))
    await world.ask("alice", begin("zebra"))
    reading = asyncio.create_task(read(world, max_tokens=2_000))
    await until(lambda: getattr(host.node.resources.table.get(BOB), "turn", None) is not None)
    await until(lambda: host.node.resources.table.get(BOB).turn.lenders)
    await world.erase("alice")
    error = await refusal_of(reading)
    agent = host.node.resources.table.get(BOB)
    left = None if agent is None or agent.saved is None else agent.saved.edited
    again = await retry(lambda: read(world))
    return error, left, world.words_on(host, "zebra"), again


def test_turn_with_an_erased_lender_fails_and_the_next_recomputes():
    error, left, words, again = play(erased_under_a_borrower).result
    assert isinstance(error, RetryLaterError)
    assert error.code == "lender_erased"
    assert (left, words) == (None, [])
    assert (again.match, again.amortized_tokens) == (MatchKind.NONE, 0)
