"""New agents, and those of a dead node, spread over equal nodes, with any measurements."""

import asyncio
from collections import Counter

import pytest

from tests.router.rig import SOON, rig
from tests.support.samples import sample

pytestmark = pytest.mark.anyio
COUNT = 36
SHARE_MAX = 0.4
SYSTEM = "You are one of many agents that begin with the same long words. " * 80
# Rates reported by equal machines: none yet, or those of early measurements.
REPORTED_RATES = {
    "one was measured first": [(1206.0, 55.0), (0.0, 0.0), (0.0, 0.0)],
    "two were measured": [(0.0, 0.0), (800.0, 50.0), (900.0, 60.0)],
    "none was measured": [(0.0, 0.0)] * 3,
    "all were, not quite alike": [(900.0, 60.0), (1200.0, 45.0), (1000.0, 50.0)],
}


def report_rates(fabric, figures):
    for node, (prefill, decode) in zip(fabric.nodes.values(), figures, strict=True):
        node.view_changes |= {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}


def nodes_of(answers):
    assert {answer.status_code for answer in answers} == {200}
    return Counter(answer.headers["x-macfabric-node"] for answer in answers)


def check(found, nodes_count=3):
    total = sum(found.values())
    assert len(found) == nodes_count, found
    assert max(found.values()) <= SHARE_MAX * 3 / nodes_count * total, found


@pytest.mark.parametrize("rates", REPORTED_RATES)
async def test_new_agents_spread_when_started_one_by_one(rates):
    async with rig() as fabric:
        report_rates(fabric, REPORTED_RATES[rates])
        await fabric.fleet.membership.refresh()
        answers = [await fabric.chat(f"I am {i}", agent=f"agent-{i}") for i in range(COUNT)]

    check(nodes_of(answers))


@pytest.mark.parametrize("rates", REPORTED_RATES)
async def test_new_agents_spread_when_started_at_once(rates):
    async with rig() as fabric:
        report_rates(fabric, REPORTED_RATES[rates])
        await fabric.fleet.membership.refresh()
        for node in fabric.nodes.values():
            node.behaviour.first_delay_s = 0.2
        answers = await asyncio.gather(
            *(fabric.chat(f"I am {i}", agent=f"agent-{i}") for i in range(COUNT))
        )

    check(nodes_of(answers))


@pytest.mark.parametrize("named", sample([True, False], False))
async def test_agents_with_the_same_long_prompt_spread(named):
    """The node that holds the prompt is cheaper for each agent, and would get them all."""
    async with rig() as fabric:
        answers = [
            await fabric.chat(f"{SYSTEM} I am {i:03}.", agent=f"a-{i}" if named else None)
            for i in range(COUNT)
        ]

    check(nodes_of(answers))


async def test_empty_node_gets_its_fair_share():
    """The node returned empty, or joined for the first time."""
    async with rig() as fabric:
        fabric["node-c"].is_draining = True
        await fabric.fleet.membership.refresh()
        early = nodes_of([await fabric.chat(f"I am {i}", agent=f"e-{i}") for i in range(30)])
        fabric["node-c"].is_draining = False
        await fabric.fleet.membership.refresh()
        late = nodes_of([await fabric.chat(f"I am {i}", agent=f"l-{i}") for i in range(30)])

    assert set(early) == {"node-a", "node-b"}
    check(early + late)


async def test_agents_of_dead_node_spread_over_the_others():
    async with rig(settings=SOON) as fabric:
        for i in range(COUNT):
            await fabric.chat(f"I am {i}", agent=f"agent-{i}")
        orphans = [key[1] for key in fabric.fleet.directory.agents_of_node("node-a")]
        report_rates(fabric, [(0.0, 0.0), (1206.0, 70.0), (0.0, 0.0)])
        await fabric.fleet.membership.refresh()
        await fabric["node-a"].stop()
        answers = await asyncio.gather(*(fabric.chat("who?", agent=agent) for agent in orphans))

    assert len(orphans) >= 0.2 * COUNT
    check(nodes_of(answers), nodes_count=2)
