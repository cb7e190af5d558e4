"""A turn is told which other node has the beginning of its prompt, or computes it."""

import pytest

from fabric import PROTOCOL_VERSION
from fabric.turn.generation import IdentityKind
from router.placement.choice import Policy
from router.placement.placement import Placement
from tests.router.rig import rig
from tests.router.turns.test_coming_heads import ended, request, sent

pytestmark = pytest.mark.anyio
SPREAD = Placement(Policy.ROUND_ROBIN)


def speak(made, **changes):
    """Have all nodes speak this version, and compute slowly."""
    for node in made.nodes.values():
        node.view_changes = {
            "protocol": PROTOCOL_VERSION,
            "prefill_tokens_per_s": 100.0,
            **changes,
        }
    return made.fleet.membership.refresh()


async def served(made, *numbers, **options):
    for asked in [request(number, **options) for number in numbers]:
        await made.fleet.membership.refresh()  # the first turns of a process take long
        opened = await made.services.turns.open(asked)
        async for _ in opened.events():
            pass


def heads(made):
    return {name: [each.head for each in node.requests] for name, node in made.nodes.items()}


def sources(made):
    return {
        name: [head.source if head else None for head in asked]
        for name, asked in heads(made).items()
    }


@pytest.mark.parametrize("kind", [IdentityKind.AGENT, IdentityKind.CONTENT])
async def test_node_that_computed_a_beginning_is_named_to_others(kind):
    async with rig("ab", tended=False, placement=SPREAD) as made:
        await speak(made)
        await served(made, 1, 2, kind=kind)
        assert sources(made) == {"node-a": [None], "node-b": ["node-a"]}
        (lent,) = heads(made)["node-b"]
        assert lent.addresses == made["node-a"].view().addresses
        assert not lent.is_coming
        assert made.fleet.partners.of("node-b") == ("node-a",)


async def test_fetched_beginning_is_the_decision_of_its_turn():
    async with rig("ab", tended=False, placement=SPREAD) as made:
        await speak(made)
        await served(made, 1, 2)
        answer = await made.http().get("/v1/placement/decisions")
    fetched, computed = answer.json()["data"]
    assert (computed["how"], computed["from"]) == ("recompute", None)
    assert (fetched["how"], fetched["node"], fetched["from"]) == ("fetch", "node-b", "node-a")
    assert fetched["terms"]["bring_s"] > 0


async def test_first_of_concurrent_prompts_lends_to_others():
    """A node that waits for the beginning lends none; any turn may be the first at its node."""
    async with rig("abc", tended=False, placement=SPREAD) as made:
        await speak(made)
        for node in made.nodes.values():
            node.does.hang = True
        asked = [request(number) for number in range(6)]
        await made.fleet.membership.refresh()
        tasks = [await sent(made, each) for each in asked]
        a = "node-a"
        assert sources(made) == {a: [None, None], "node-b": [a, a], "node-c": [a, a]}
        assert all(each.is_coming for asked in heads(made).values() for each in asked if each)
        await ended(*tasks)


async def test_fetched_tokens_are_booked_as_little_work():
    async with rig("ab", tended=False, placement=SPREAD) as made:
        await speak(made)
        await served(made, 1)
        made["node-b"].does.hang = True
        task = await sent(made, request(2))
        alone_s = request(2).prompt.tokens_estimate / 100
        assert 0 < made.fleet.ledger.prefill_s("node-b") < alone_s / 5
        await ended(task)


@pytest.mark.parametrize("changes", [{"protocol": None}, {"prefill_tokens_per_s": 1e9}])
async def test_other_versions_and_fast_nodes_get_no_lender(changes):
    async with rig("ab", tended=False, placement=SPREAD) as made:
        await speak(made, **changes)
        await served(made, 1, 2)
        assert sources(made) == {"node-a": [None], "node-b": [None]}
