"""A real node keeps its tombstones, and nothing that they name."""

import asyncio
import errno
import shutil
import time

import pytest

from fabric.control.erasure_calls import EraseAgent, EraseReceipt, KnownErasures, ShareErasures
from fabric.control.node_calls import (
    Describe,
    NodeView,
)
from fabric.errors import FabricError, RetryLaterError, StaleEpochError
from fabric.hosting.clock import SystemClock
from fabric.ids import OperationId
from fabric.record.tombstone import tombstone
from node.store.posix_disk import DiskError, PosixDisk
from node.store.tombstones import TombstoneStore
from tests.support.erasures import (
    ATTEMPTS,
    PROMPT,
    Refusal,
    agents,
    blocks,
    erase,
)
from tests.support.services import KEY, TENANT, ask, call, running
from tests.support.tiny_models import LLAMA, write_model
from tests.support.waiting import wait_until

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), LLAMA | {"num_hidden_layers": 2}))


def test_erased_agent_is_removed_from_a_restored_folder(tmp_path, model):
    """A tombstone applies to restored backups, other models' folders and lost last writes alike."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        ask(service, PROMPT + "and more of it", agent="bob")
        ask(service, "quite another text, of nobody else " * 8, agent="carol")
    (models,) = [p for p in (tmp_path / "node-a").iterdir() if len(p.name) == 16]
    shutil.copytree(models, tmp_path / "backup")
    with running(tmp_path, model) as service:
        receipt = erase(service, "carol")
        assert agents(service) == {"alice": 1, "bob": 1}
        repeated = erase(service, "carol")
    shutil.rmtree(models)
    shutil.copytree(tmp_path / "backup", models)
    before = blocks(tmp_path)
    with running(tmp_path, model) as service:
        found = agents(service)
        new_turn = ask(service, PROMPT, agent="carol")
        late = erase(service, "carol", receipt.tombstone.epoch)
        after = agents(service)

    assert receipt.existed
    assert receipt.tombstone.epoch == 1_001
    assert not repeated.existed
    assert found == {"alice": 1, "bob": 1}
    assert len(blocks(tmp_path)) < len(before)
    assert new_turn.admitted.epoch == 1_002
    assert not late.existed, "an old DELETE that arrives late spares the new agent"
    assert after["carol"] == 1_002


@pytest.mark.parametrize("days", [(0, 200, 0), (200, 0, -200), (-200, 0), (-20_000, 0)])
def test_wrong_clocks_do_not_revive_an_erased_agent(tmp_path, model, monkeypatch, days):
    """The clock may be wrong at the erasure or at boot by any amount, and right again later."""
    wall_s = time.time()  # noqa: TID251 - what the calendar says is the point
    for day in days:
        now_s = wall_s + day * DAY_S
        monkeypatch.setattr(SystemClock, "wall_s", lambda _, now_s=now_s: now_s)
        with running(tmp_path, model) as service:
            if not (tmp_path / "backup").exists():
                ask(service, PROMPT, agent="alice")
                (models,) = [p for p in (tmp_path / "node-a").iterdir() if len(p.name) == 16]
                shutil.copytree(models, tmp_path / "backup")
                stone = erase(service, "alice").tombstone
            assert agents(service) == {}
            assert service.node.resources.erased.all == (stone,)
            known = call(service, ShareErasures((stone,)), KnownErasures)
            assert known.erased == (stone,)
        shutil.rmtree(models)
        shutil.copytree(tmp_path / "backup", models)


def test_turn_with_an_erased_epoch_starts_no_agent(tmp_path, model):
    """The epoch above the erased ones was given to another node."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice", epoch=1)
        erase(service, "alice")
        for epoch in (1, 1_001):
            with pytest.raises(StaleEpochError, match="was erased"):
                ask(service, PROMPT, agent="alice", epoch=epoch)
            assert agents(service) == {}
        ask(service, PROMPT, agent="alice", epoch=1_003)
        with pytest.raises(StaleEpochError, match="is stale"):
            ask(service, PROMPT, agent="alice", epoch=1)
        assert agents(service) == {"alice": 1_003}


@pytest.mark.parametrize("epoch", [0, 1, 1_002])
def test_turn_during_an_erasure_is_refused(tmp_path, model, epoch):
    """Between the tombstone and the removal the agent is still present."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice", epoch=1)
        node = service.node
        node.resources.erased.announce(
            [tombstone(KEY, TENANT, "alice", 1_001, node.resources.clock.wall_s())]
        )
        with pytest.raises(RetryLaterError, match="being erased"):
            ask(service, PROMPT, agent="alice", epoch=epoch)
        assert erase(service, "alice").existed
        assert agents(service) == {}


def test_erasure_during_a_tombstone_write_is_kept(tmp_path, monkeypatch):
    disk = PosixDisk(tmp_path)
    erased = TombstoneStore(disk, KEY)
    first, second = (tombstone(KEY, TENANT, "alice", epoch, 1.0) for epoch in (5, 9))
    publish = disk.publish

    def slow(name, parts):
        publish(name, parts)
        erased.announce([second])

    monkeypatch.setattr(disk, "publish", slow)
    erased.note(first)
    assert erased.floor(TENANT, "alice") == second.epoch
    assert erased.is_all_written
    monkeypatch.undo()
    disk.close()
    again = TombstoneStore(PosixDisk(tmp_path), KEY)
    assert again.all == (second,)
    again.close()


def test_shared_tombstones_remove_agents_of_a_running_node(tmp_path, model):
    with (
        running(tmp_path, model, "node-a") as away,
        running(tmp_path, model, "node-b") as here,
    ):
        for service in (away, here):
            ask(service, PROMPT, agent="alice")
        receipt = erase(here, "alice", 5)
        known = call(here, ShareErasures(()), KnownErasures)
        for removed in (1, 0):
            answer = call(away, ShareErasures(known.erased), KnownErasures)
            assert (answer.erased, answer.agents_removed) == (known.erased, removed)
        views = [call(service, Describe(), NodeView) for service in (away, here)]
        left = agents(away)

    assert known.erased == (receipt.tombstone,)
    assert left == {}
    assert views[0].erased == views[1].erased != 0
    with running(tmp_path, model, "node-a") as again:
        assert again.node.view().erased == views[0].erased


def test_damaged_tombstone_does_not_block_the_start(tmp_path, model):
    with running(tmp_path, model) as service:
        for name in ("alice", "bob"):
            ask(service, PROMPT, agent=name)
            receipt = erase(service, name)
    path = tmp_path / "node-a" / "erased" / "agents" / receipt.tombstone.agent
    path.write_bytes(path.read_bytes()[:-1])
    with running(tmp_path, model) as service:
        assert len(service.node.resources.erased.all) == 1


def test_refused_erasure_is_finished_in_the_background(tmp_path, model, monkeypatch):
    """The tombstone is stored, so no later exchange repeats it: the node retries by itself."""
    monkeypatch.setattr("node.upkeep.FLUSH_IDLE_S", 0.05)
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice", epoch=1)
        refusal = Refusal(monkeypatch, "erase_record")
        with pytest.raises(FabricError, match="the drive refused"):
            erase(service, "alice")
        wait_until(lambda: refusal.count > ATTEMPTS)  # retried and refused
        with pytest.raises(RetryLaterError, match="being erased"):
            ask(service, PROMPT, agent="alice")
        refusal.is_mended = True
        wait_until(lambda: not agents(service))
        wait_until(lambda: not blocks(tmp_path))
        assert ask(service, PROMPT, agent="alice").admitted.epoch == 1_002


def test_blocks_left_by_an_erasure_are_removed_later(tmp_path, model, monkeypatch):
    monkeypatch.setattr("node.upkeep.FLUSH_IDLE_S", 0.05)
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        block = next(tmp_path.glob("node-a/*/blocks/*.full"))
        damaged = block.parent.parent / "quarantine" / block.name
        damaged.parent.mkdir(exist_ok=True)
        damaged.write_bytes(block.read_bytes())
        refusal = Refusal(monkeypatch, "erase_blocks")
        with pytest.raises(FabricError, match="the drive refused"):
            erase(service, "alice")
        wait_until(lambda: not blocks(tmp_path) and not damaged.exists())
        assert refusal.count == 1, "the record was already removed"


# --- refused and dropped tombstones ----------------------------------------------------------


class FullDisk:
    """The folder of tombstones, on a drive that refuses writes until it is mended."""

    def __init__(self, service, monkeypatch):
        self.is_mended, disk = False, service.node.resources.erased._disk
        real = disk.publish

        def publish(name, parts):
            if not self.is_mended:
                message = "full"
                raise DiskError(message, errno.ENOSPC)
            return real(name, parts)

        monkeypatch.setattr(disk, "publish", publish)


def tombstones(folder):
    return sorted(path.name for path in folder.glob("node-a/erased/agents/*"))


def test_refused_tombstone_is_not_reported_and_written_later(tmp_path, model, monkeypatch):
    monkeypatch.setattr("node.upkeep.FLUSH_IDLE_S", 0.05)
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        full = FullDisk(service, monkeypatch)
        first = erase(service, "alice")
        again = erase(service, "alice")
        assert first.existed
        assert first.tombstone is again.tombstone is None
        assert tombstones(tmp_path) == []
        assert "not complete" in call(service, Describe(), NodeView).degraded
        full.is_mended = True
        wait_until(lambda: tombstones(tmp_path) != [])
        assert erase(service, "alice").tombstone is not None
        wait_until(lambda: call(service, Describe(), NodeView).degraded is None)
    with running(tmp_path, model) as service:
        assert service.node.resources.erased.floor(TENANT, "alice") == 1_001


def test_refused_shared_tombstone_is_written_later(tmp_path, model, monkeypatch):
    monkeypatch.setattr("node.upkeep.FLUSH_IDLE_S", 0.05)
    with (
        running(tmp_path, model, "node-b") as here,
        running(tmp_path, model, "node-a") as away,
    ):
        stone = erase(here, "alice").tombstone
        full = FullDisk(away, monkeypatch)
        known = call(away, ShareErasures((stone,)), KnownErasures)
        assert (known.erased, tombstones(tmp_path)) == ((stone,), [])
        full.is_mended = True
        wait_until(lambda: tombstones(tmp_path) == [stone.agent])


def test_files_of_dropped_tombstones_are_removed(tmp_path, model, monkeypatch):
    monkeypatch.setattr("fabric.record.tombstone.TOMBSTONES_MAX", 3)
    with running(tmp_path, model) as service:
        for number in range(8):
            erase(service, f"unknown-{number}")
        assert len(service.node.resources.erased.all) == len(tombstones(tmp_path)) == 3


def test_duplicate_erase_calls_get_the_same_receipt(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        node, now_s = service.node, service.node.resources.clock.wall_s()
        message = EraseAgent(TENANT, "alice", 1_001, OperationId("test-twice"), now_s)

        async def erase_twice():
            return await asyncio.gather(*(node.commands.erasing.erase(message) for _ in range(2)))

        one, two = asyncio.run_coroutine_threadsafe(erase_twice(), service._loop).result(60)
        late = call(service, message, EraseReceipt)

    assert one == two == late
    assert one.existed
