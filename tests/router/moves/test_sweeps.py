"""Sweeps look at what changed, however many agents there are."""

import pytest

from fabric.ids import AgentId, TenantId
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
TENANT = TenantId("default")
TWO = RouterSettings(takeover_after_s=20.0, replicas=1)


def counted(services, monkeypatch):
    """List the agents that sweeps look at."""
    looked, look = [], services.replicas._look

    def count(key, takes):
        looked.append(key[1])
        return look(key, takes)

    monkeypatch.setattr(services.replicas, "_look", count)
    return looked


async def test_without_replicas_nothing_is_looked_at(monkeypatch):
    async with rig("ab", tended=False) as made:
        looked = counted(made.services, monkeypatch)
        for number in range(5):
            await made.chat("hello", agent=f"agent-{number}")
        await made.fleet.membership.refresh(relist=True)
        await made.services.replicas.sweep()
        made.fleet.membership.find("node-a").heartbeat_s -= 60
        await made.services.replicas.sweep()

    assert looked == []
    assert not made.services.replicas._changed


async def test_only_agents_that_changed_are_looked_at(monkeypatch):
    async with rig("abc", settings=TWO, tended=False) as made:
        replicas, directory = made.services.replicas, made.fleet.directory
        for number in range(4):
            await made.chat("hello", agent=f"agent-{number}")
        await made.fleet.membership.refresh(relist=True)
        await replicas.sweep()
        await replicas.sweep()
        assert all(len(directory.holdings((TENANT, f"agent-{n}"))) == 2 for n in range(4))
        looked = counted(made.services, monkeypatch)
        await replicas.sweep()
        assert looked == []
        await made.chat("hello", "echo", "again", agent="agent-2")
        await made.fleet.membership.refresh(relist=True)
        await replicas.sweep()
        assert set(looked) == {"agent-2"}


async def test_agents_of_a_lost_node_get_copies_elsewhere():
    async with rig("abc", settings=TWO, tended=False) as made:
        replicas, directory = made.services.replicas, made.fleet.directory
        key = (TENANT, AgentId("alice"))
        await made.chat("hello", agent="alice")
        await made.fleet.membership.refresh(relist=True)
        await replicas.sweep()
        await replicas.sweep()
        [copy] = [h.node for h in directory.holdings(key) if h.state is OwnerState.REPLICA]
        made[copy].is_down = True
        made.fleet.membership.find(copy).heartbeat_s -= 60

        await replicas.sweep()
        held = [h.node for h in directory.holdings(key) if h.state is OwnerState.REPLICA]
        assert len(held) == 2


async def test_a_copy_that_had_no_node_is_made_when_one_comes():
    async with rig("ab", settings=TWO, tended=False) as made:
        replicas, directory = made.services.replicas, made.fleet.directory
        key = (TENANT, AgentId("alice"))
        await made.chat("hello", agent="alice")
        await made.fleet.membership.refresh(relist=True)
        other = next(n for n in made.nodes if n != directory.owner(key).node)
        made[other].view_changes = {"state": "draining"}
        await made.fleet.membership.refresh()
        await replicas.sweep()
        assert not directory.has_copies(key)
        made[other].view_changes = {}
        await made.fleet.membership.refresh()
        await replicas.sweep()
        await until(lambda: directory.has_copies(key))
