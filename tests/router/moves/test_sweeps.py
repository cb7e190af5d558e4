"""Sweeps inspect only changed agents, however many there are."""

import pytest

from fabric.ids import AgentId, TenantId
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
TENANT = TenantId("default")
TWO = RouterSettings(takeover_after_s=20.0, replicas=1)


def inspected_agents(services, monkeypatch):
    """Record the agents that sweeps inspect."""
    inspected, inspect = [], services.replicas._find_due_copies

    def record_and_inspect(key, takes):
        inspected.append(key[1])
        return inspect(key, takes)

    monkeypatch.setattr(services.replicas, "_find_due_copies", record_and_inspect)
    return inspected


async def test_sweep_without_replicas_inspects_nothing(monkeypatch):
    async with rig("ab", tended=False) as fabric:
        inspected = inspected_agents(fabric.services, monkeypatch)
        for number in range(5):
            await fabric.chat("hello", agent=f"agent-{number}")
        await fabric.fleet.membership.refresh(relist=True)
        await fabric.services.replicas.sweep()
        fabric.fleet.membership.find("node-a").heartbeat_s -= 60
        await fabric.services.replicas.sweep()

    assert inspected == []
    assert not fabric.services.replicas._changed


async def test_sweep_inspects_only_changed_agents(monkeypatch):
    async with rig("abc", settings=TWO, tended=False) as fabric:
        replicas, directory = fabric.services.replicas, fabric.fleet.directory
        for number in range(4):
            await fabric.chat("hello", agent=f"agent-{number}")
        await fabric.fleet.membership.refresh(relist=True)
        await replicas.sweep()
        await replicas.sweep()
        assert all(len(directory.holdings((TENANT, f"agent-{n}"))) == 2 for n in range(4))
        inspected = inspected_agents(fabric.services, monkeypatch)
        await replicas.sweep()
        assert inspected == []
        await fabric.chat("hello", "echo", "again", agent="agent-2")
        await fabric.fleet.membership.refresh(relist=True)
        await replicas.sweep()
        assert set(inspected) == {"agent-2"}


async def test_replicas_on_lost_node_are_replaced():
    async with rig("abc", settings=TWO, tended=False) as fabric:
        replicas, directory = fabric.services.replicas, fabric.fleet.directory
        key = (TENANT, AgentId("alice"))
        await fabric.chat("hello", agent="alice")
        await fabric.fleet.membership.refresh(relist=True)
        await replicas.sweep()
        await replicas.sweep()
        [copy] = [h.node for h in directory.holdings(key) if h.state is OwnerState.REPLICA]
        fabric[copy].is_down = True
        fabric.fleet.membership.find(copy).heartbeat_s -= 60

        await replicas.sweep()
        held = [h.node for h in directory.holdings(key) if h.state is OwnerState.REPLICA]
        assert len(held) == 2


async def test_missing_replica_is_created_when_a_node_is_ready():
    async with rig("ab", settings=TWO, tended=False) as fabric:
        replicas, directory = fabric.services.replicas, fabric.fleet.directory
        key = (TENANT, AgentId("alice"))
        await fabric.chat("hello", agent="alice")
        await fabric.fleet.membership.refresh(relist=True)
        other = next(n for n in fabric.nodes if n != directory.owner(key).node)
        fabric[other].view_changes = {"state": "draining"}
        await fabric.fleet.membership.refresh()
        await replicas.sweep()
        assert not directory.has_copies(key)
        fabric[other].view_changes = {}
        await fabric.fleet.membership.refresh()
        await replicas.sweep()
        await until(lambda: directory.has_copies(key))
