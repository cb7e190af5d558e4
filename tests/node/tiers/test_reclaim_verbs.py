"""Expiry, pins, erasures, smaller records, and the folders of other models."""

import errno
import os
import time
from dataclasses import replace

import pytest

from fabric.codec import pack
from fabric.control.agent_at import OfferRequest
from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.node_calls import AgentList, AgentView, Done, Flush, ListAgents, PinAgent
from fabric.errors import FabricError
from fabric.hosting.clock import SystemClock
from fabric.ids import AgentId, OperationId
from fabric.turn.generation import CacheTier
from node.store.model_folders import ModelFolders
from node.store.posix_disk import DiskError, PosixDisk
from node.store.service_time import Served
from node.tiers.disk_budget import record_bytes
from tests.support.architectures import ARCHITECTURES
from tests.support.samples import sample
from tests.support.services import TENANT, ask, call, running
from tests.support.small_node import (
    BRIEF,
    DAY_S,
    WORDS,
    age,
    check,
    on_loop,
    stored,
    talk,
)
from tests.support.tiny_models import write_model


def test_expired_agents_are_evicted_and_active_or_pinned_are_kept(model, tmp_path):
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        for number in range(3):
            talk(service, number)
        call(service, PinAgent(TENANT, AgentId("a-1"), pinned=True), AgentView)
        age(service, DAY_S + 1)
        talk(service, 2)
        on_loop(service, service.node.background.upkeep.round())
        assert stored(service) == {"a-1", "a-2"}
        with pytest.raises(FabricError):
            call(service, PinAgent(TENANT, AgentId("a-0"), pinned=True), AgentView)


@pytest.mark.parametrize("seconds", [-10 * DAY_S, 10 * DAY_S])
def test_wall_clock_jump_expires_no_agent(model, tmp_path, monkeypatch, seconds):
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        talk(service, 0)
        wall_s = time.time()  # noqa: TID251 - what the calendar says is the point
        monkeypatch.setattr(
            type(service.node.resources.clock), "wall_s", lambda _: wall_s + seconds
        )
        on_loop(service, service.node.background.upkeep.round())
        assert stored(service) == {"a-0"}


def test_pins_survive_restart_and_count_within_their_share_only(model, agent_bytes, tmp_path):
    budget = 5 * agent_bytes
    with running(tmp_path, model, disk_bytes=budget) as service:
        for number in range(3):
            talk(service, number)
            view = call(service, PinAgent(TENANT, AgentId(f"a-{number}"), pinned=True), AgentView)
            assert view.pinned
            assert view.pin_held  # the latest pin replaces the one before
    with running(tmp_path, model, disk_bytes=budget) as service:
        seen = {a.view.agent: a.view for a in call(service, ListAgents(), AgentList).agents}
        assert all(view.pinned for view in seen.values())
        (held,) = [name for name, view in seen.items() if view.pin_held]
        for number in range(10, 20):
            assert talk(service, number).finished.durable
        assert held in stored(service)
        assert len(stored(service) & {"a-0", "a-1", "a-2"}) == 1
        view = call(service, PinAgent(TENANT, AgentId(held), pinned=False), AgentView)
        assert (view.pinned, view.pin_held) == (False, False)


def advance_wall_clock(monkeypatch, seconds):
    wall_s = time.time() + seconds  # noqa: TID251 - what the calendar says is the point
    monkeypatch.setattr(SystemClock, "wall_s", lambda _: wall_s)


def test_wrong_wall_clock_at_boot_expires_no_agent(model, tmp_path, monkeypatch):
    other = tmp_path / "node-a" / ("0" * 16) / "manifests"
    other.mkdir(parents=True)
    (other / "m").write_bytes(b"m")
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        talk(service, 0)
    advance_wall_clock(monkeypatch, 400 * DAY_S)
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        assert stored(service) == {"a-0"}
        talk(service, 1)
    advance_wall_clock(monkeypatch, 0)
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        assert stored(service) == {"a-0", "a-1"}
    assert other.exists()


def test_idle_time_continues_across_restarts(model, tmp_path, monkeypatch):
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        talk(service, 0)
        monotonic_s = SystemClock.monotonic_s
        monkeypatch.setattr(SystemClock, "monotonic_s", lambda c: monotonic_s(c) + DAY_S / 2)
        talk(service, 1)
    monkeypatch.undo()
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        assert stored(service) == {"a-0", "a-1"}
        monkeypatch.setattr(SystemClock, "monotonic_s", lambda c: monotonic_s(c) + 0.6 * DAY_S)
        on_loop(service, service.node.background.upkeep.round())
        assert stored(service) == {"a-1"}


def test_offered_and_busy_agents_are_not_evicted(model, tmp_path):
    with running(tmp_path, model, "left") as left:
        talk(left, 0)
        agent = left.node.resources.table.get((TENANT, "a-0"))
        request = OfferRequest(TENANT, "a-0", 1, "migration-1", "right")
        left.node.resources.transfers.offers.add(
            request, list(dict.fromkeys(agent.saved.refs)), 60.0
        )
        assert on_loop(left, left.node.tiers.eviction.evict([agent])) == 0
        left.node.resources.transfers.offers.withdraw("migration-1")

        async def busy():
            async with agent.turn_lock:
                return await left.node.tiers.eviction.evict([agent])

        assert on_loop(left, busy()) == 0
        assert on_loop(left, left.node.tiers.eviction.evict([agent])) == 1


def test_folders_of_other_models_expire_and_are_evicted_first(model, agent_bytes, tmp_path):
    used = {}

    def folder(name, idle_s, size=1_000):
        used[name] = 9 * DAY_S - idle_s
        path_ = tmp_path / "node-a" / name
        (path_ / "manifests").mkdir(parents=True)
        (path_ / "blocks").mkdir()
        (path_ / "blocks" / "b").write_bytes(bytes(size))
        (path_ / "manifests" / "m").write_bytes(b"m")
        os.utime(path_ / "manifests" / "m", (0, 0))  # independent of the wall clock
        return path_

    expired = folder("0" * 16, 2 * DAY_S)
    recent = folder("1" * 16, 3_600, size=2 * agent_bytes)
    newest = folder("2" * 16, 60)
    strange = folder("not-a-model", 9 * DAY_S)
    disk = PosixDisk(tmp_path / "node-a")
    disk.publish("served", [pack(Served(9 * DAY_S, used))])
    disk.close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"kept")
    (expired / "link").symlink_to(outside)
    (tmp_path / "node-a" / ("3" * 16)).symlink_to(outside)
    with running(tmp_path, model, disk_bytes=4 * agent_bytes) as service:
        assert [path.exists() for path in (expired, recent, newest)] == [False, True, True]
        talk(service, 0)
        assert recent.exists()
        talk(service, 1)
        assert [path.exists() for path in (recent, newest)] == [False, True]
        assert stored(service) == {"a-0", "a-1"}
    assert strange.exists()
    assert (outside / "kept").exists()


def test_folder_served_by_another_process_is_kept(model, tmp_path):
    with running(tmp_path, model) as service:
        talk(service, 0)
        serving = service.node.resources.identity.fingerprint.hex()[:16]
        listed = ModelFolders(tmp_path / "node-a", "f" * 16).list_all()
        assert [folder.name for folder in listed] == [serving]
        folders = ModelFolders(tmp_path / "node-a", "f" * 16)
        assert not folders.remove(listed[0])
        assert service.node.resources.store.blocks.check_integrity() == []


@pytest.mark.parametrize("name", sample(["gemma3_text", "qwen3_next"], "qwen3_next"))
def test_old_windows_and_states_are_evicted_before_agents(name, tmp_path):
    """Records get smaller first; the rest still restores the agent to its end, bit for bit."""
    folder = str(write_model(tmp_path / "model", ARCHITECTURES[name]))
    messages = [{"role": "user", "content": WORDS * 5}]
    with running(tmp_path, folder) as service:
        for _ in range(2):
            reply = ask(service, messages, agent="long", **BRIEF)
            messages += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": "and the dog sat"},
            ]
        agent = service.node.resources.table.get((TENANT, "long"))
        before = agent.saved
        needed = service.node.resources.store.blocks.total_bytes + record_bytes(before)

        async def squeeze():
            budget = service.node.tiers.budget
            budget._disk = replace(budget._disk, limit_bytes=needed - 1)
            await service.node.background.upkeep.round()

        on_loop(service, squeeze())
        after = agent.saved
        assert service.node.resources.table.get((TENANT, "long")) is agent
        assert len(after.windows) + len(after.states) < len(before.windows) + len(before.states)
        assert after.pieces == before.pieces
        check(service, needed - 1)
        warm = ask(service, messages, agent="long", **BRIEF)
        assert warm.admitted.cache is CacheTier.HOT
    with running(tmp_path, folder) as service:
        again = ask(service, messages, agent="long", **BRIEF)
        assert again.admitted.cache is CacheTier.DISK
        assert again.text == warm.text


@pytest.mark.parametrize("trouble", ["lost block", "full drive"])
def test_agent_that_cannot_be_trimmed_is_evicted(tmp_path, monkeypatch, trouble):
    """An agent that cannot be trimmed does not block saving the turns of others."""
    folder = str(write_model(tmp_path / "model", ARCHITECTURES["gemma3_text"]))
    messages = [{"role": "user", "content": WORDS * 5}]
    with running(tmp_path, folder) as service:
        ask(service, messages, agent="hurt", **BRIEF)
        agent = service.node.resources.table.get((TENANT, "hurt"))
        needed = service.node.resources.store.blocks.total_bytes + record_bytes(agent.saved)
        call(service, Flush(drop_hot=True), Done)
        if trouble == "lost block":
            service.node.resources.store.blocks._quarantine(
                agent.saved.pieces[0].block, "for the test"
            )
        else:
            monkeypatch.setattr(service.node.resources.store, "publish", _raise_full_disk)

        async def squeeze():
            budget = service.node.tiers.budget
            budget._disk = replace(budget._disk, limit_bytes=needed // 2)
            await service.node.background.upkeep.round()

        on_loop(service, squeeze())
        assert service.node.resources.table.get((TENANT, "hurt")) is None
        monkeypatch.undo()
        assert ask(service, "one two", agent="other", **BRIEF).finished.durable
        assert service.node.resources.store.blocks.check_integrity() == []


def _raise_full_disk(*_):
    raise DiskError("no room", errno.ENOSPC)  # noqa: TRY003 - stands in for the disk's own


def test_stuck_record_does_not_block_other_evictions(model, tmp_path, monkeypatch):
    with running(tmp_path, model) as service:
        for number in range(3):
            talk(service, number)
        stuck = service.node.resources.table.get((TENANT, "a-1"))
        evict_ = service.node.resources.store.evict

        def refuse_if_stuck(records):
            if stuck.saved in records:
                _raise_full_disk()
            evict_(records)

        monkeypatch.setattr(service.node.resources.store, "evict", refuse_if_stuck)
        assert (
            on_loop(service, service.node.tiers.eviction.evict(list(service.node.resources.table)))
            == 2
        )
        assert stored(service) == {"a-1"}
        with pytest.raises(DiskError):
            on_loop(service, service.node.tiers.eviction.evict([stuck]))
        monkeypatch.undo()
        assert on_loop(service, service.node.tiers.eviction.evict([stuck])) == 1
        assert service.node.resources.store.blocks.check_integrity() == []


def test_erase_receipt_counts_removed_and_shared_blocks(model, tmp_path):
    operations = iter("123")

    def erased(service, name):
        operation = OperationId(f"erase-000{next(operations)}")
        now_s = service.node.resources.clock.wall_s()
        call_ = EraseAgent(TENANT, AgentId(name), 1_001, operation, now_s)
        return call(service, call_, EraseReceipt)

    with running(tmp_path, model) as service:
        for name in ("one", "two"):
            ask(service, f"{WORDS * 4} {name}", agent=name, **BRIEF)
        damaged = service.node.resources.table.get((TENANT, "one")).saved.pieces[-1].block
        service.node.resources.store.blocks._quarantine(damaged, "for the test")
        root = service._disk.root
        assert len(list((root / "quarantine").iterdir())) == 1
        first, second, third = (erased(service, name) for name in ("one", "two", "one"))
        assert list((root / "quarantine").iterdir()) == []
        assert list((root / "blocks").iterdir()) == list((root / "manifests").iterdir()) == []
    assert (first.existed, first.record_removed) == (True, True)
    assert first.blocks_kept_shared > 0
    assert first.bytes_kept_shared > 0
    assert second.blocks_kept_shared == second.bytes_kept_shared == 0
    assert second.blocks_removed > first.blocks_kept_shared
    assert second.bytes_removed >= first.bytes_kept_shared
    assert third == EraseReceipt(service.node.name, existed=False, tombstone=third.tombstone)
    assert third.tombstone.epoch == 1_001
