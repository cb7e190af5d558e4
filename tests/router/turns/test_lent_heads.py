"""Turns name another node that has, or computes, the beginning of their prompt."""

import pytest

from fabric import PROTOCOL_VERSION
from fabric.turn.generation import IdentityKind
from router.placement.choice import Policy
from router.placement.placement import Placement
from tests.router.rig import rig
from tests.router.turns.test_coming_heads import cancel, request, send

pytestmark = pytest.mark.anyio
SPREAD = Placement(Policy.ROUND_ROBIN)


def configure_nodes(fabric, **changes):
    """Make all nodes report this protocol version and a low prefill rate."""
    for node in fabric.nodes.values():
        node.view_changes = {
            "protocol": PROTOCOL_VERSION,
            "prefill_tokens_per_s": 100.0,
            **changes,
        }
    return fabric.fleet.membership.refresh()


async def serve_turns(fabric, *numbers, **options):
    for turn in [request(number, **options) for number in numbers]:
        await fabric.fleet.membership.refresh()  # the first turns of a process take long
        opened = await fabric.services.turns.open(turn)
        async for _ in opened.events():
            pass


def heads(fabric):
    return {name: [each.head for each in node.requests] for name, node in fabric.nodes.items()}


def sources(fabric):
    return {
        name: [head.source if head else None for head in turn_heads]
        for name, turn_heads in heads(fabric).items()
    }


@pytest.mark.parametrize("kind", [IdentityKind.AGENT, IdentityKind.CONTENT])
async def test_node_that_computed_a_beginning_is_named_to_others(kind):
    async with rig("ab", tended=False, placement=SPREAD) as fabric:
        await configure_nodes(fabric)
        await serve_turns(fabric, 1, 2, kind=kind)
        assert sources(fabric) == {"node-a": [None], "node-b": ["node-a"]}
        (head,) = heads(fabric)["node-b"]
        assert head.addresses == fabric["node-a"].view().addresses
        assert not head.is_coming
        assert fabric.fleet.partners.of("node-b") == ("node-a",)


async def test_fetched_beginning_is_the_decision_of_its_turn():
    async with rig("ab", tended=False, placement=SPREAD) as fabric:
        await configure_nodes(fabric)
        await serve_turns(fabric, 1, 2)
        answer = await fabric.http().get("/v1/placement/decisions")
    fetched, computed = answer.json()["data"]
    assert (computed["how"], computed["from"]) == ("recompute", None)
    assert (fetched["how"], fetched["node"], fetched["from"]) == ("fetch", "node-b", "node-a")
    assert fetched["terms"]["bring_s"] > 0


async def test_first_of_concurrent_prompts_lends_to_others():
    """A node that waits for a prefix does not lend it; any turn may be the first at its node."""
    async with rig("abc", tended=False, placement=SPREAD) as fabric:
        await configure_nodes(fabric)
        for node in fabric.nodes.values():
            node.behaviour.hang = True
        turns = [request(number) for number in range(6)]
        await fabric.fleet.membership.refresh()
        tasks = [await send(fabric, turn) for turn in turns]
        a = "node-a"
        assert sources(fabric) == {a: [None, None], "node-b": [a, a], "node-c": [a, a]}
        assert all(head.is_coming for of_node in heads(fabric).values() for head in of_node if head)
        await cancel(*tasks)


async def test_fetched_tokens_are_booked_as_little_work():
    async with rig("ab", tended=False, placement=SPREAD) as fabric:
        await configure_nodes(fabric)
        await serve_turns(fabric, 1)
        fabric["node-b"].behaviour.hang = True
        task = await send(fabric, request(2))
        alone_s = request(2).prompt.tokens_estimate / 100
        assert 0 < fabric.fleet.ledger.prefill_s("node-b") < alone_s / 5
        await cancel(task)


@pytest.mark.parametrize("changes", [{"protocol": None}, {"prefill_tokens_per_s": 1e9}])
async def test_other_versions_and_fast_nodes_get_no_lender(changes):
    async with rig("ab", tended=False, placement=SPREAD) as fabric:
        await configure_nodes(fabric, **changes)
        await serve_turns(fabric, 1, 2)
        assert sources(fabric) == {"node-a": [None], "node-b": [None]}
