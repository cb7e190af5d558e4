"""Clients of a new router wait until it has found its nodes."""

import asyncio

import pytest

from tests.router.fake_node import FakeNode
from tests.router.rig import rig

pytestmark = pytest.mark.anyio


async def test_a_turn_waits_until_a_new_router_has_met_a_node():
    async with rig("a", started=False, tended=False) as made:
        asking = asyncio.create_task(made.chat("hi"))
        await asyncio.sleep(0.1)
        waited = not asking.done()
        await made.fleet.membership.discover()
        await made.fleet.membership.refresh()
        answer = await asking

    assert waited
    assert answer.status_code == 200


async def test_no_model_is_called_missing_before_every_node_has_named_its_own():
    nodes = [FakeNode("node-a", model="echo"), FakeNode("node-b", model="other")]
    async with rig(nodes=nodes, started=False, tended=False) as made:
        membership = made.fleet.membership
        made.services.erasure_exchange._heard.add(
            "node-b"
        )  # else node-a's greeting would wait for it
        await membership.discover()
        await membership.heartbeat(membership.find("node-a"))
        asking = asyncio.create_task(made.chat("hi", model="other"))
        await asyncio.sleep(0.1)
        waited = not asking.done()
        await membership.heartbeat(membership.find("node-b"))
        answer = await asking
        unknown = await made.chat("hi", model="a third")

    assert waited
    assert answer.status_code == 200
    assert unknown.status_code == 404


async def test_a_fabric_without_nodes_says_so_at_once():
    async with rig("a", started=False, tended=False) as made:
        made.fleet.discovery._until_s = float("inf")
        membership = made.fleet.membership
        await membership.discover()
        membership._members.clear()
        answer = await made.chat("hi")

    assert answer.json()["error"]["code"] == "no_node_ready"


async def test_a_node_that_never_answers_is_not_waited_for_longer_than_any_other():
    async with rig("a", started=False, tended=False, scale=50) as made:
        made["node-a"].is_down = True
        await made.fleet.membership.discover()
        answer = await made.chat("hi")

    assert answer.json()["error"]["code"] == "no_node_ready"
