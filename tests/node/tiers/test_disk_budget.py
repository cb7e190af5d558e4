"""Eviction within a disk budget, without failed turns."""

import asyncio
import time

import pytest

from fabric.control.node_calls import (
    Done,
    Flush,
)
from fabric.errors import FabricError
from fabric.ids import TenantId
from fabric.retention import TenantShare
from fabric.turn.generation import CacheTier
from node.tiers.disk_budget import NoRoomError, record_bytes
from tests.support.services import TENANT, ask, call, migrate, running
from tests.support.small_node import (
    BRIEF,
    WORDS,
    age,
    check,
    on_loop,
    stored,
    talk,
)


def test_full_disk_evicts_for_every_turn_and_after_restart(model, agent_bytes, tmp_path):
    budget = 4 * agent_bytes + agent_bytes // 2
    with running(tmp_path, model, disk_bytes=budget) as service:
        for number in range(9):
            assert talk(service, number).finished.durable
            check(service, budget)
        left = stored(service)
        assert 3 <= len(left) <= 4
        assert "a-8" in left
        assert service.node.view().evicted_agents == 9 - len(left)
        assert service.node.health.degraded is None
        assert talk(service, 8).admitted.cache is CacheTier.HOT
        again = talk(service, 0)  # evicted: starts again
        assert again.admitted.cache is CacheTier.COLD
        assert again.finished.durable
    with running(tmp_path, model, disk_bytes=2 * agent_bytes) as service:
        check(service, 2 * agent_bytes)
        assert 1 <= len(stored(service)) <= 2


def test_full_budget_degrades_the_node_but_fails_no_turn(model, agent_bytes, tmp_path):
    with running(tmp_path, model, disk_bytes=agent_bytes // 2) as service:
        first = talk(service, 0)
        assert not first.finished.durable
        assert service.node.health.degraded == "cannot save agents: the disk budget is full"
        assert service.node.view().failed_saves >= 1
        assert talk(service, 0).admitted.cache is CacheTier.HOT
        assert talk(service, 0).text == first.text
        assert stored(service) == set()
        check(service, agent_bytes // 2)
        assert "memory only" in call(service, Flush(), Done).detail
        on_loop(service, expect_no_room(service))


def test_blocks_of_a_refused_save_are_reclaimed(model, agent_bytes, tmp_path):
    """The blocks are unreferenced, and no published record sweeps them."""
    # Records of equal agents differ by some bytes, as they contain the times of turns.
    with running(tmp_path, model, disk_bytes=agent_bytes - 100) as service:
        blocks = service.node.resources.store.blocks
        assert not talk(service, 0).finished.durable
        on_loop(service, expect_no_room(service))
        assert blocks.total_bytes == 0


def test_retained_agent_outlives_agents_used_since(model, agent_bytes, tmp_path):
    with running(tmp_path, model, disk_bytes=3 * agent_bytes + agent_bytes // 2) as service:
        talk(service, 0, retain_s=3600.0)
        talk(service, 1)
        for number in range(2, 6):
            age(service, 60.0)
            talk(service, number)
            check(service, 4 * agent_bytes)
        assert "a-0" in stored(service)
        assert "a-1" not in stored(service)
        age(service, 3600.0)
        service.node.resources.table.use._retained_s.clear()  # as after its deadline
        talk(service, 6)
        assert "a-0" not in stored(service)


async def expect_no_room(service):
    with pytest.raises(NoRoomError):
        await service.node.tiers.budget.make_room(TENANT, 1 << 40)


def test_hot_memory_of_unsaved_agents_is_bounded(model, agent_bytes, tmp_path):
    """Agents without room on disk stay hot as far as the hot budget goes, the newest first."""
    with running(tmp_path, model, disk_bytes=1, hot_bytes=1 << 30) as service:
        for number in range(3):
            assert not talk(service, number).finished.durable
        hot = service.node.resources.table.hot_bytes

        async def squeeze():
            service.node.resources.table.drop_resident(1)
            assert service.node.resources.table.hot_bytes == hot
            service.node.resources.table.drop_unsaved(hot - 1)

        on_loop(service, squeeze())
        assert {agent.key[1] for agent in service.node.resources.table} == {"a-1", "a-2"}


def test_flood_of_one_tenant_does_not_evict_other_tenants(model, agent_bytes, tmp_path):
    quiet = TenantId("quiet")
    budget = 9 * agent_bytes  # floors of four and a half agents: the flood exceeds its own
    with running(tmp_path, model, disk_bytes=budget) as service:
        for number in range(3):
            talk(service, number, quiet, "q")
        age(service, 3600.0)
        for number in range(14):
            assert talk(service, number).finished.durable
            check(service, budget)
        assert stored(service, quiet) == {"q-0", "q-1", "q-2"}
        assert len(stored(service)) >= 3
        call(service, Flush(drop_hot=True), Done)
        for number in range(3):
            back = talk(service, number, quiet, "q").admitted
            assert (back.cache, back.cached_tokens) == (CacheTier.DISK, back.prompt_tokens - 1)


def test_turn_keeps_blocks_shared_with_the_agent_it_evicts(model, agent_bytes, tmp_path):
    """A new agent shares its beginning with an idle one, whose space it then needs."""
    head, tail = WORDS * 8, "and so on and so on. " * 60

    def run_both(service):
        ask(service, head, agent="parent", **BRIEF)
        return ask(service, head + tail, agent="child", **BRIEF)

    with running(tmp_path, model, "roomy") as service:
        run_both(service)
        needed = service.node.resources.store.blocks.total_bytes - 1
        needed += sum(record_bytes(agent.saved) for agent in service.node.resources.table)
    with running(tmp_path, model, disk_bytes=needed) as service:
        child = run_both(service)
        assert child.admitted.cached_tokens >= 512
        assert child.finished.durable
        assert stored(service) == {"child"}
        check(service, needed)


def test_tenant_floors_hold_for_hot_memory(model, agent_bytes, tmp_path):
    quiet = TenantId("quiet")
    with running(tmp_path, model) as service:
        talk(service, 0, quiet, "q")
        one = service.node.resources.table.hot_bytes
        age(service, 3600.0)
        for number in range(5):
            talk(service, number)

        async def squeeze():
            service.node.resources.table.drop_resident(3 * one)

        on_loop(service, squeeze())
        hot = {agent.key[1] for agent in service.node.resources.table if agent.cache is not None}
        assert hot == {"q-0", "a-3", "a-4"}


def test_tenant_quota_holds_on_an_otherwise_empty_disk(model, agent_bytes, tmp_path):
    shares = {str(TENANT): TenantShare(quota=0.3)}
    with running(tmp_path, model, disk_bytes=10 * agent_bytes, tenants=shares) as service:
        for number in range(6):
            assert talk(service, number).finished.durable
        assert 2 <= len(stored(service)) <= 3
        assert "a-5" in stored(service)


def test_bytes_of_a_tenant_on_disk_are_limited_and_not_those_in_memory(
    model, agent_bytes, tmp_path
):
    shares = {str(TENANT): TenantShare(disk_bytes=3 * agent_bytes)}
    other = TenantId("other")
    with running(tmp_path, model, disk_bytes=20 * agent_bytes, tenants=shares) as service:
        for number in range(6):
            assert talk(service, number).finished.durable
            talk(service, number, other, "o")
        assert 2 <= len(stored(service)) <= 3
        assert "a-5" in stored(service)
        assert len(stored(service, other)) == 6


def test_agent_over_its_tenants_bytes_is_reported_once(model, agent_bytes, tmp_path, caplog):
    shares = {str(TENANT): TenantShare(disk_bytes=agent_bytes // 2)}
    with running(tmp_path, model, disk_bytes=20 * agent_bytes, tenants=shares) as service:
        assert not talk(service, 0).finished.durable
        reason = "cannot save agents: a tenant's part of the disk is full"
        assert service.node.health.degraded == reason
        for _ in range(5):
            assert "memory only" in call(service, Flush(), Done).detail
        failed_count = service.node.view().failed_saves
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    reported = [text for text in errors if "in memory only" in text]
    assert failed_count > 5
    assert 1 <= len(reported) <= 2, "once by its turn, and at most once by a later save"
    assert all("node.tenants.NAME.disk_bytes" in text for text in reported)


def test_estimate_of_a_record_counts_the_history_of_its_turns(model, tmp_path):
    with running(tmp_path, model) as service:
        for _ in range(12):
            talk(service, 0)
        (agent,) = service.node.resources.table
        estimated_bytes = record_bytes(agent.saved)
        (file,) = (path for path in tmp_path.rglob("manifests/*") if path.is_file())
        assert len(agent.saved.provenance.turns) > 1_000
        assert 0.8 * file.stat().st_size < estimated_bytes


def test_number_of_agents_per_node_is_bounded(model, tmp_path, monkeypatch):
    for module in ("node.agents.agent_table", "node.tiers.disk_budget"):
        monkeypatch.setattr(f"{module}.AGENTS_PER_NODE_MAX", 4)
    with running(tmp_path, model) as service:
        for number in range(9):
            assert talk(service, number).finished.durable
        assert len(service.node.resources.table) <= 4
        assert "a-8" in stored(service)


def test_turn_waiting_for_an_evicted_agent_starts_a_new_one(model, tmp_path, monkeypatch):
    with running(tmp_path, model) as service:
        first = talk(service, 0)
        store = service.node.resources.store
        removing, evict_now = [], store.evict

        def slow(records):
            removing.append(asyncio.run_coroutine_threadsafe(_turn(service), service._loop))
            time.sleep(0.2)
            evict_now(records)

        monkeypatch.setattr(store, "evict", slow)
        agent = service.node.resources.table.get((TENANT, "a-0"))
        assert on_loop(service, service.node.tiers.eviction.evict([agent])) == 1
        assert removing[0].result(60) == first.text
        assert service.node.resources.table.get((TENANT, "a-0")) is not agent
        assert stored(service) == {"a-0"}
        assert store.blocks.check_integrity() == []


async def _turn(service):
    return await asyncio.to_thread(lambda: talk(service, 0).text)


@pytest.mark.parametrize("short_bytes", [0, 8])
def test_migration_evicts_on_the_target_or_is_refused(model, agent_bytes, tmp_path, short_bytes):
    """Records with two turns are longer than those with one, which the budget was measured by."""
    budget_bytes = 2 * agent_bytes - short_bytes
    with (
        running(tmp_path, model, "left") as left,
        running(tmp_path, model, "right", disk_bytes=budget_bytes) as right,
        running(tmp_path, model, "tiny", disk_bytes=agent_bytes // 2) as tiny,
    ):
        text = talk(left, 0).text
        for number in (1, 2):
            talk(right, number)
        with pytest.raises(FabricError) as refused:
            migrate(left, tiny, "a-0", 1)
        assert refused.value.code == "disk_budget"
        assert talk(left, 0).text == text
        migrate(left, right, "a-0", 1)
        assert "a-0" in stored(right)
        check(right, budget_bytes)
