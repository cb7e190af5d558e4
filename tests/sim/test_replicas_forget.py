"""A replica is renewed or dropped soon after its owner has forgotten a message."""

import asyncio
from unittest.mock import AsyncMock, patch

import pytest

from fabric.control.directive_calls import DirectAgent
from fabric.control.node_calls import OfferMigration
from fabric.errors import RetryLaterError
from fabric.ids import MigrationId
from router.moves.replicas import Replicas
from tests.sim.script import Talk, play
from tests.sim.test_replica_directives import ALICE, FORGET, SETTINGS

SECRET = "a secret"
SOON_S = 5.0


def words_on(host):
    """List the files of a disk that contain the secret, as text or as tokens."""
    forms = (SECRET.encode(), b"".join(ord(char).to_bytes(4, "little") for char in SECRET))
    return [name for name, raw in host.drive.files.items() if any(f in raw for f in forms)]


async def copy_and_forget(world, *, kept):
    """Copy an agent, have it forget the secret, and let its next turn apply that."""
    alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
    assert await alice.say(SECRET)
    copy = world.nodes[min(world.nodes.keys() - {alice.last.node})]
    await services.replicas.replicate(alice.key, copy.name, kept=kept)
    assert words_on(copy)
    await services.propagation.apply(DirectAgent(*alice.key, (FORGET,)))
    alice.messages[1] = {"role": "user", "content": "nothing"}
    assert await alice.say("more", sent={1: SECRET})
    assert not words_on(world.nodes[alice.last.node])
    return alice, copy


@pytest.mark.parametrize("kept", [True, False])
def test_replica_is_renewed_or_dropped_after_forget(kept):
    async def live(world):
        alice, copy = await copy_and_forget(world, kept=kept)
        await asyncio.sleep(SOON_S)
        assert not words_on(copy)
        assert (copy.node.resources.table.get(alice.key) is not None) == kept

    play(live, SETTINGS)


def test_stale_offer_does_not_keep_a_replica():
    """An interrupted move from there left an offer that is valid for minutes."""

    async def live(world):
        alice, copy = await copy_and_forget(world, kept=False)
        move = OfferMigration(*alice.key, 1, MigrationId("migration-9"), alice.last.node)
        copy.node.tiers.eviction.offers.add(
            move, copy.node.resources.table.get(alice.key).saved.refs, 600.0
        )
        await asyncio.sleep(SOON_S)
        assert not words_on(copy)

    play(live, SETTINGS)


def test_replica_that_cannot_be_renewed_is_dropped():
    async def live(world):
        refused = AsyncMock(side_effect=RetryLaterError("no room", code="busy"))
        alice, copy = await copy_and_forget(world, kept=True)
        with patch.object(Replicas, "_copy", refused):
            await asyncio.sleep(SOON_S)
        assert not words_on(copy)
        assert copy.node.resources.table.get(alice.key) is None

    play(live, SETTINGS)


def test_replica_of_an_absent_node_forgets_on_return():
    async def live(world):
        alice, services = Talk(world, ALICE, "you are alice " * 60), world.router.services
        assert await alice.say(SECRET)
        copy = world.nodes[min(world.nodes.keys() - {alice.last.node})]
        await services.replicas.replicate(alice.key, copy.name, kept=False)
        copy.freeze()
        await asyncio.sleep(SOON_S * 3)
        await services.propagation.apply(DirectAgent(*alice.key, (FORGET,)))
        alice.messages[1] = {"role": "user", "content": "nothing"}
        assert await alice.say("more", sent={1: SECRET})
        copy.thaw()
        await asyncio.sleep(SOON_S * 3)
        assert not words_on(copy)

    play(live, SETTINGS)
