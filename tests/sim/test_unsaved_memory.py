"""Memory of what a disk has refused: it is given back as soon as it is saved."""

import asyncio
from dataclasses import replace

from fabric.ids import AgentId, OperationId
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling
from tests.sim.scripted import SETTINGS, TENANT, begin, play
from tests.sim.tokenizer import render

KIB = 1 << 10
NAMES = ("alice", "bob", "carol")  # any two of them fit the memory


async def remember(node, name):
    """Take a turn on this very node."""
    request = GenerateRequest(
        operation=OperationId(f"op-{name:>12}".replace(" ", "0")),
        tenant=TENANT,
        identity=Identity(IdentityKind.AGENT, AgentId(name)),
        sampling=Sampling(max_tokens=4, ignore_eos=True),
        prompt=render(begin(name)),
        epoch=1,
    )
    return [event async for event in node.turns.serve(request)][-1]


async def saved_one_after_another(world):
    """Let a disk that has refused three agents take them again, slowly."""
    host = world.nodes["node-a"]
    node, table = host.node, host.node.table
    await world.on(host, node.retries.stop())  # so that this alone saves them
    host.platter.is_full = True
    for name in NAMES:
        last = await world.on(host, remember(node, name))
        assert not last.durable
    assert table.hot_bytes > node.hot.limit_bytes, "refused, they stay beyond the budget"
    host.platter.is_full, host.platter.slow_s = False, 1.0
    flushing = world.here(host, node.flusher.flush())
    seen = []
    while not flushing.done():
        waiting = [agent for agent in table if agent.cache is not None and agent.is_unsaved]
        saved = [a for a in table if a.cache is not None and not (a.is_unsaved or a.is_busy)]
        seen.append((len(waiting), len(saved), table.hot_bytes > node.hot.limit_bytes))
        await asyncio.sleep(0.01)
    return seen


def test_what_is_saved_makes_room_while_others_are_still_to_be_saved():
    settings = replace(SETTINGS, hot_bytes=12 * KIB)
    seen = play(saved_one_after_another, settings=settings).result
    assert {waiting for waiting, _, _ in seen} >= {1, 2, 3}, "one after another"
    assert not any(saved and is_over for _, saved, is_over in seen)
