"""Prompt heads that nodes of a whole fabric lend each other, and concurrent erasures."""

import asyncio
from contextlib import contextmanager
from unittest import mock

import pytest

from node.migration.prefix_target import SharedPrefixTarget
from router.placement.choice import Policy
from router.placement.placement import Placement
from tests.sim.scripted import FILLER, SETTINGS, Script
from tests.sim.world import World, run
from tests.support.incoming import pinned_blocks

WORD = "lantern"  # in the system prompt of all agents
LIVES = 6
DELAYS_S = [at * 0.02 for at in range(12)]


class LendingScript(Script):
    """A scripted life in which short heads are lent, too."""

    lends_heads = True


class LendingWorld(World):
    """A random life in which short heads are lent, too."""

    lends_heads = True


def play_script(script, kind="full"):
    """Live a script's life; return its result."""
    world = run(1, lambda seed, loop: LendingScript(seed, loop, script, kind, SETTINGS))
    assert world.violation is None, world.violation
    return world.result


@contextmanager
def placing_round_robin(world):
    """Place turns on one node after the other."""
    targets = world.router.services.turns._targets
    with mock.patch.object(targets, "_placement", Placement(Policy.ROUND_ROBIN)):
        yield


def begin(word):
    return [
        {"role": "system", "content": f"You are of help. {FILLER * 8}"},
        {"role": "user", "content": f"{word} {FILLER}"},
    ]


def leftovers(world):
    """Return blocks that no record refers to, and files with words of the system prompt."""
    nodes = [host.node for host in world.nodes.values()]
    return [
        *(pinned_blocks(node) for node in nodes if pinned_blocks(node)),
        *(node.tiers.leases.refs for node in nodes if node.tiers.leases.refs),
        *(words for host in world.nodes.values() if (words := world.words_on(host, WORD))),
    ]


def test_agents_on_three_nodes_compute_their_head_once():
    async def script(world):
        with placing_round_robin(world):
            first, _, _ = await world.ask("alice", begin("alice"))
            asking = [world.ask(name, begin(name)) for name in ("bob", "carol")]
            others = [turn[0] for turn in await asyncio.gather(*asking)]
        assert {first.node, *(each.node for each in others)} == set(world.nodes)
        assert min(each.fetched_tokens or 0 for each in others) >= 1_024
        for name in ("alice", "bob", "carol"):
            await world.erase(name)
        await asyncio.sleep(1.0)
        return leftovers(world)

    assert play_script(script) == []


@pytest.mark.parametrize("kind", ["full", "window", "recurrent", "all"])
def test_erased_lender_leaves_nothing_at_any_moment(kind):
    async def script(world):
        fetched = []
        for number, delay_s in enumerate(DELAYS_S):
            lender, borrower = f"lender-{number}", f"borrower-{number}"
            with placing_round_robin(world):
                await world.ask(lender, begin(lender))
                taking = asyncio.create_task(world.ask(borrower, begin(borrower)))
                await asyncio.sleep(delay_s)
                await world.erase(lender)
                admitted, _, finished = await taking
            assert finished is not None
            fetched.append(admitted.fetched_tokens or 0)
            await world.erase(borrower)
            await asyncio.sleep(0.5)
            assert leftovers(world) == []
        return fetched

    fetched = play_script(script, kind=kind)
    assert any(fetched), "some heads arrive before the erasure"


def test_lender_that_dies_costs_no_answer():
    async def script(world):
        with placing_round_robin(world):
            first, _, _ = await world.ask("alice", begin("alice"))
            taking = asyncio.create_task(world.ask("bob", begin("bob")))
            await asyncio.sleep(0.02)
            world.nodes[first.node].kill()
            _, text, finished = await taking
        assert finished is not None
        return text

    async def calm(world):
        _, text, _ = await world.ask("bob", begin("bob"))
        return text

    assert play_script(script) == play_script(calm)


@pytest.mark.slow
def test_lives_with_lent_heads_violate_nothing():
    """Random lives with erasures, kills and moves."""
    taken = []
    take = SharedPrefixTarget.take_head

    async def counted(target, *words):
        taken.append(await take(target, *words))
        return taken[-1]

    with mock.patch.object(SharedPrefixTarget, "take_head", counted):
        for seed in range(LIVES):
            assert run(seed, LendingWorld).violation is None, f"seed {seed}"
    assert taken
