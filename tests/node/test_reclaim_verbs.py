"""Expiry, pins, erasures, smaller records, and the folders of other models."""

import os
import time
from dataclasses import replace

import pytest

from fabric.control import (
    AgentList,
    AgentView,
    EraseAgent,
    EraseReceipt,
    ListAgents,
    PinAgent,
)
from fabric.errors import FabricError
from fabric.generation import CacheTier
from fabric.ids import AgentId, OperationId
from node.disk_tier import record_bytes
from node.eviction import evict
from tests.support.architectures import ARCHITECTURES
from tests.support.little_room import (
    BRIEF,
    DAY_S,
    SMALL,
    WORDS,
    age,
    agent_bytes_in,
    check,
    on_loop,
    stored,
    talk,
)
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


@pytest.fixture(scope="module")
def agent_bytes(model, tmp_path_factory):
    return agent_bytes_in(tmp_path_factory.mktemp("measure"), model)


def test_the_expired_go_and_the_active_and_pinned_stay(model, tmp_path):
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        for number in range(3):
            talk(service, number)
        call(service, PinAgent(TENANT, AgentId("a-1"), pinned=True), AgentView)
        age(service, DAY_S + 1)
        talk(service, 2)
        on_loop(service, service.node.reclaim.round())
        assert stored(service) == {"a-1", "a-2"}
        with pytest.raises(FabricError):
            call(service, PinAgent(TENANT, AgentId("a-0"), pinned=True), AgentView)


@pytest.mark.parametrize("seconds", [-10 * DAY_S, 10 * DAY_S])
def test_a_jump_of_the_calendar_makes_nobody_old(model, tmp_path, monkeypatch, seconds):
    with running(tmp_path, model, disk_ttl_s=DAY_S) as service:
        talk(service, 0)
        wall_s = time.time()  # noqa: TID251 - what the calendar says is the point
        monkeypatch.setattr(type(service.node.clock), "wall_s", lambda _: wall_s + seconds)
        on_loop(service, service.node.reclaim.round())
        assert stored(service) == {"a-0"}


def test_pins_outlive_restarts_and_beyond_their_part_count_for_nothing(
    model, agent_bytes, tmp_path
):
    budget = 5 * agent_bytes
    with running(tmp_path, model, disk_bytes=budget) as service:
        for number in range(3):
            talk(service, number)
            view = call(service, PinAgent(TENANT, AgentId(f"a-{number}"), pinned=True), AgentView)
            assert view.pinned
            assert view.pin_held  # the latest; it takes the place of the one before
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


def test_offered_and_busy_agents_stay(model, tmp_path):
    with running(tmp_path, model, "left") as left:
        talk(left, 0)
        agent = left.node.table.get((TENANT, "a-0"))
        left.node.transfers.offer(
            "migration-1", TENANT, "a-0", "right", 1, list(dict.fromkeys(agent.saved.refs)), 60.0
        )
        assert on_loop(left, evict(left.node, [agent])) == 0
        left.node.transfers.withdraw("migration-1")

        async def busy():
            async with agent.turn_lock:
                return await evict(left.node, [agent])

        assert on_loop(left, busy()) == 0
        assert on_loop(left, evict(left.node, [agent])) == 1


def test_other_models_folders_expire_and_go_first_for_room(model, agent_bytes, tmp_path):
    def folder(name, used_s, size=1_000):
        made = tmp_path / "node-a" / name
        (made / "manifests").mkdir(parents=True)
        (made / "blocks").mkdir()
        (made / "blocks" / "b").write_bytes(bytes(size))
        (made / "manifests" / "m").write_bytes(b"m")
        os.utime(made / "manifests" / "m", (used_s, used_s))
        return made

    now = time.time()  # noqa: TID251 - what the calendar says is the point
    expired = folder("0" * 16, now - 2 * DAY_S)
    recent = folder("1" * 16, now - 3_600, size=2 * agent_bytes)
    newest = folder("2" * 16, now - 60)
    strange = folder("not-a-model", now - 9 * DAY_S)
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


def test_a_folder_that_another_process_serves_is_left_alone(model, tmp_path):
    with running(tmp_path, model) as service:
        talk(service, 0)
        serving = service.node.fingerprint.hex()[:16]
        listed = type(service.node.reclaim._folders)(tmp_path / "node-a", "f" * 16).list_all()
        assert [folder.name for folder in listed] == [serving]
        folders = type(service.node.reclaim._folders)(tmp_path / "node-a", "f" * 16)
        assert not folders.remove(listed[0])
        assert service.node.store.blocks.check_integrity() == []


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_old_windows_and_states_go_before_agents(name, tmp_path):
    """Records get smaller first; what is left brings the agent back to its end, bit for bit."""
    folder = str(write_model(tmp_path / "model", ARCHITECTURES[name]))
    messages = [{"role": "user", "content": WORDS * 5}]
    with running(tmp_path, folder) as service:
        for _ in range(2):
            reply = ask(service, messages, agent="long", **BRIEF)
            messages += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": "and the dog sat"},
            ]
        agent = service.node.table.get((TENANT, "long"))
        before = agent.saved
        needed = service.node.store.blocks.total_bytes + record_bytes(before)

        async def squeeze():
            settings = replace(service.node.settings, disk_bytes=needed - 1)
            service.node.config = replace(service.node.config, settings=settings)
            await service.node.reclaim.round()

        on_loop(service, squeeze())
        after = agent.saved
        assert service.node.table.get((TENANT, "long")) is agent
        assert len(after.windows) + len(after.states) < len(before.windows) + len(before.states)
        assert after.pieces == before.pieces
        check(service, needed - 1)
        warm = ask(service, messages, agent="long", **BRIEF)
        assert warm.admitted.cache is CacheTier.HOT
    with running(tmp_path, folder) as service:
        again = ask(service, messages, agent="long", **BRIEF)
        assert again.admitted.cache is CacheTier.DISK
        assert again.text == warm.text


def test_an_erasure_says_what_went_and_what_others_keep(model, tmp_path):
    def erased(service, name):
        call_ = EraseAgent(OperationId("erase-0001"), TENANT, AgentId(name))
        return call(service, call_, EraseReceipt)

    with running(tmp_path, model) as service:
        for name in ("one", "two"):
            ask(service, f"{WORDS * 4} {name}", agent=name, **BRIEF)
        damaged = service.node.table.get((TENANT, "one")).saved.pieces[-1].block
        service.node.store.blocks._quarantine(damaged, "for the test")
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
    assert third == EraseReceipt(service.node.name, existed=False)
