"""Directives survive the loss of an owner, since its replicas have them."""

import asyncio
from unittest.mock import AsyncMock, patch

import pytest

from fabric.control.directive_calls import ChangeSettings, DirectAgent
from fabric.edit_mode import EditMode
from fabric.errors import RetryLaterError
from fabric.ids import AgentId, OperationId
from fabric.record.directive import Directive
from fabric.record.message_positions import message_digest
from fabric.settings import NodeSettings
from fabric.turn.messages import Message, MessageRole
from node.tiers.eviction import Eviction
from router.moves.replicas import Replicas
from tests.sim.script import Talk, play

MIB = 1 << 20
SETTINGS = NodeSettings(hot_bytes=MIB, disk_bytes=64 * MIB)
ALICE = AgentId("alice")
LEASE_OVER_S = 10.0
SECRET = Message(MessageRole.USER, ("a secret",))
FORGET = Directive(
    OperationId("operation-1"), EditMode.FORGET, "nothing", message_digest=message_digest(SECRET)
)


def test_replica_gets_directives_before_they_are_acknowledged():
    async def live(world):
        alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
        assert await alice.say("a secret")
        copy = min(world.nodes.keys() - {alice.last.node})
        await services.replicas.replicate(alice.key, copy, kept=True)
        for call in (
            DirectAgent(*alice.key, (FORGET,)),
            ChangeSettings(*alice.key, is_private=True),
        ):
            await services.propagation.apply(call)
        record = world.nodes[copy].node.resources.table.get(alice.key).saved
        assert [each.operation for each in record.directives] == ["operation-1"]
        assert record.is_private

    play(live, SETTINGS)


def test_directive_that_misses_a_replica_is_not_acknowledged():
    async def live(world):
        alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
        assert await alice.say("a secret")
        copy = min(world.nodes.keys() - {alice.last.node})
        await services.replicas.replicate(alice.key, copy, kept=True)
        refused = AsyncMock(side_effect=RetryLaterError("in use", code="busy"))
        call = DirectAgent(*alice.key, (FORGET,))
        with (
            patch.object(Replicas, "refresh", refused),
            patch.object(Eviction, "evict", AsyncMock(return_value=())),
            pytest.raises(RetryLaterError, match="has not received the change"),
        ):
            await services.propagation.apply(call)
        view = await services.propagation.apply(call)
        assert [each.operation for each in view.directives] == ["operation-1"]
        record = world.nodes[copy].node.resources.table.get(alice.key).saved
        assert [each.operation for each in record.directives] == ["operation-1"]

    play(live, SETTINGS)


def test_agent_restarted_elsewhere_stays_private():
    async def live(world):
        alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
        assert await alice.say("one")
        await services.propagation.apply(ChangeSettings(*alice.key, is_private=True))
        lost = alice.last.node
        world.nodes[lost].freeze()
        await asyncio.sleep(LEASE_OVER_S)
        assert await alice.say("two")
        assert alice.last.node != lost
        assert world.nodes[alice.last.node].node.resources.table.get(alice.key).manifest.is_private

    play(live, SETTINGS)
