"""Clients of a new router wait until it has found its nodes."""

import asyncio

import pytest

from tests.router.fake_node import FakeNode
from tests.router.rig import rig

pytestmark = pytest.mark.anyio


async def test_turn_waits_until_new_router_finds_a_node():
    async with rig("a", started=False, tended=False) as fabric:
        asking = asyncio.create_task(fabric.chat("hi"))
        await asyncio.sleep(0.1)
        waited = not asking.done()
        await fabric.fleet.membership.discover()
        await fabric.fleet.membership.refresh()
        answer = await asking

    assert waited
    assert answer.status_code == 200


async def test_unknown_model_is_404_only_after_all_nodes_reported():
    nodes = [FakeNode("node-a", model="echo"), FakeNode("node-b", model="other")]
    async with rig(nodes=nodes, started=False, tended=False) as fabric:
        membership = fabric.fleet.membership
        fabric.services.erasure_exchange._reporters.add(
            "node-b"
        )  # otherwise node-a's handshake would wait for node-b
        await membership.discover()
        await membership.heartbeat(membership.find("node-a"))
        asking = asyncio.create_task(fabric.chat("hi", model="other"))
        await asyncio.sleep(0.1)
        waited = not asking.done()
        await membership.heartbeat(membership.find("node-b"))
        answer = await asking
        unknown = await fabric.chat("hi", model="a third")

    assert waited
    assert answer.status_code == 200
    assert unknown.status_code == 404


async def test_fabric_without_nodes_fails_at_once():
    async with rig("a", started=False, tended=False) as fabric:
        fabric.fleet.discovery._until_s = float("inf")
        membership = fabric.fleet.membership
        await membership.discover()
        membership._members.clear()
        answer = await fabric.chat("hi")

    assert answer.json()["error"]["code"] == "no_node_ready"


async def test_silent_node_is_not_awaited_longer():
    async with rig("a", started=False, tended=False, scale=50) as fabric:
        fabric["node-a"].is_down = True
        await fabric.fleet.membership.discover()
        answer = await fabric.chat("hi")

    assert answer.json()["error"]["code"] == "no_node_ready"
