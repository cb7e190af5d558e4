"""Remains of an erased agent: other models, quarantine, undecided records, moves, turns."""

import asyncio
import errno
from concurrent.futures import ThreadPoolExecutor

import pytest

from fabric.control.erasure_calls import EraseAgent, KnownErasures, ShareErasures
from fabric.control.node_calls import (
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
    Done,
    Offer,
    OfferMigration,
    ReleaseAgent,
)
from fabric.errors import FabricError
from fabric.ids import AgentId, MigrationId, OperationId
from fabric.record.tombstone import tombstone
from fabric.turn.generation import CacheTier, GenerateRequest, Identity, IdentityKind, Sampling
from node.store.posix_disk import DiskError
from tests.support.erasures import (
    PROMPT,
    Refusal,
    agents,
    erase,
    files,
)
from tests.support.failing_disk import FailingCalls
from tests.support.services import KEY, TENANT, ask, call, running
from tests.support.small_node import on_loop
from tests.support.tiny_models import LLAMA, write_model
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), LLAMA | {"num_hidden_layers": 2}))


def test_erasure_removes_agents_of_models_not_served(tmp_path, model, tmp_path_factory):
    other = str(write_model(tmp_path_factory.mktemp("other"), LLAMA | {"num_hidden_layers": 3}))
    with running(tmp_path, other) as service:
        ask(service, PROMPT, agent="alice", epoch=70_000)
        kept = ask(service, "quite another text, of nobody else " * 8, agent="bob").text
        ask(service, PROMPT + "and more", agent="carol")
    (folder,) = [p for p in (tmp_path / "node-a").iterdir() if len(p.name) == 16]
    (folder / "manifests" / ".tmp-dead-1").write_bytes(b"half a record")
    before = files(tmp_path)
    with running(tmp_path, model) as service:
        receipt = erase(service, "alice", 100_000)
        again = erase(service, "alice", 100_001)
        absent = erase(service, "unknown")
    after = files(tmp_path)
    with running(tmp_path, other) as service:
        assert agents(service) == {"bob": 1, "carol": 1}
        restored = ask(service, "quite another text, of nobody else " * 8, agent="bob")

    assert receipt.existed
    assert not receipt.record_removed
    assert receipt.other_models.records == 1
    assert receipt.other_models.blocks == len(before) - len(after) - 2 > 0
    assert receipt.other_models.bytes > 0
    assert not again.existed
    assert not absent.existed
    assert not list(folder.glob("manifests/.tmp*"))
    assert restored.text == kept
    assert restored.admitted.cache is CacheTier.DISK


def test_erasure_keeps_later_agents_and_removes_damaged_records(tmp_path, model, tmp_path_factory):
    other = str(write_model(tmp_path_factory.mktemp("other"), LLAMA | {"num_hidden_layers": 3}))
    with running(tmp_path, other) as service:
        ask(service, PROMPT, agent="alice", epoch=5_000)
        ask(service, "quite another text, of nobody else " * 8, agent="bob")
        damaged = service._disk.root / service.node.resources.store._manifests._name(
            (TENANT, "bob")
        )
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with running(tmp_path, model) as service:
        spared, gone = erase(service, "alice", 4_000), erase(service, "bob")
    with running(tmp_path, other) as service:
        assert agents(service) == {"alice": 5_000}

    assert not spared.existed
    assert gone.other_models.records == 1


def test_shared_tombstones_remove_agents_from_all_folders(tmp_path, model, tmp_path_factory):
    other = str(write_model(tmp_path_factory.mktemp("other"), LLAMA | {"num_hidden_layers": 3}))
    with running(tmp_path, other) as service:
        ask(service, PROMPT, agent="alice")
    with (
        running(tmp_path, model, "node-b") as here,
        running(tmp_path, model, "node-a") as away,
    ):
        stone = erase(here, "alice").tombstone
        known = call(away, ShareErasures((stone,)), KnownErasures)

    assert known.agents_removed == 1
    assert files(tmp_path) == []


def test_shared_tombstones_remove_quarantined_blocks(tmp_path, model):
    """A quarantined block names no agent; blocks of existing agents are kept for inspection."""
    with running(tmp_path, model) as service:
        erase(service, "another")
        ask(service, PROMPT, agent="alice")
        block = next(tmp_path.glob("node-a/*/blocks/*.full"))
        damaged = block.parent.parent / "quarantine" / f"{block.name}.checksum"
        damaged.parent.mkdir(exist_ok=True)
        damaged.write_bytes(block.read_bytes())
        agent = service.node.resources.table.get((TENANT, "alice"))
        on_loop(service, service.node.tiers.eviction.evict([agent]))
    with running(tmp_path, model) as service:
        on_loop(service, service.node.commands.erasing.finish())
        assert damaged.exists()
        stone = tombstone(KEY, TENANT, "alice", 1_001, service.node.resources.clock.wall_s())
        call(service, ShareErasures((stone,)), KnownErasures)
        assert not damaged.exists()


def test_block_quarantined_during_an_erasure_is_removed(tmp_path, model):
    """A pin in progress may quarantine it: the erasure waits for the pin."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        agent = service.node.resources.table.get((TENANT, "alice"))
        lock, store = agent.turn_lock, service.node.resources.store
        on_loop(service, lock.acquire())
        with ThreadPoolExecutor(1) as pool:
            receipt = pool.submit(erase, service, "alice")
            wait_until(lambda: lock._waiting_count)
            block = next(tmp_path.glob("node-a/*/blocks/*.full"))
            block.write_bytes(block.read_bytes()[:-1])
            assert store.blocks.verify(agent.saved.refs)
            service._loop.call_soon_threadsafe(lock.release)
        assert receipt.result().existed
        assert files(tmp_path) == []


def test_erasure_removes_a_quarantined_record(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        record = service._disk.root / service.node.resources.store._manifests._name(
            (TENANT, "alice")
        )
    raw = bytearray(record.read_bytes())
    raw[3] ^= 1
    record.write_bytes(raw)
    with running(tmp_path, model) as service:
        assert agents(service) == {}
        assert len(files(tmp_path, "quarantine")) == 1
        receipt = erase(service, "alice")
        again = erase(service, "alice")
        assert files(tmp_path) == []

    assert receipt.existed
    assert receipt.quarantined_removed
    assert not again.existed


def test_erasure_removes_an_unacknowledged_first_record(tmp_path, model, monkeypatch):
    with running(tmp_path, model) as service:
        disk = service._disk
        real, real_remove = disk.publish, disk.remove_all

        def publish(name, parts):
            real(name, parts)
            if name.startswith("manifests/"):
                error = DiskError("the folder was not flushed", errno.EIO)
                error.is_in_place = True
                raise error

        def remove_all(names):
            if any(name.startswith("manifests/") for name in names):
                message = "nothing can be removed"
                raise DiskError(message, errno.EIO)
            return real_remove(names)

        with monkeypatch.context() as failing:
            failing.setattr(disk, "publish", publish)
            failing.setattr(disk, "remove_all", remove_all)
            kept = ask(service, PROMPT, agent="alice")
            shed = ask(service, "quite another text, of nobody else " * 8, agent="bob")
        assert not kept.finished.durable
        assert not shed.finished.durable
        node = service.node
        agent = node.resources.table.get((TENANT, "bob"))
        service._loop.call_soon_threadsafe(
            node.resources.table.forget, agent
        )  # as when memory is short
        wait_until(lambda: node.resources.table.get((TENANT, "bob")) is None)
        receipts = [erase(service, name) for name in ("alice", "bob")]
        assert files(tmp_path) == []

    assert [receipt.record_removed for receipt in receipts] == [True, True]
    assert receipts[0].blocks_removed > 0


def test_erasure_ends_a_running_turn(tmp_path, model):
    with running(tmp_path, model) as service:
        request = GenerateRequest(
            operation=OperationId("test-op-turn"),
            tenant=TENANT,
            identity=Identity(IdentityKind.AGENT, AgentId("alice")),
            sampling=Sampling(max_tokens=10_000, ignore_eos=True),
            prompt=PROMPT,
        )

        async def erase_during_turn():
            events = service.node.turns.serve(request)
            await anext(events)
            now_s = service.node.resources.clock.wall_s()
            message = EraseAgent(TENANT, "alice", 1_001, OperationId("test-erase-turn"), now_s)
            receipt = await service.node.commands.erasing.erase(message)
            return receipt, [event async for event in events][-1]

        receipt, last = asyncio.run_coroutine_threadsafe(erase_during_turn(), service._loop).result(
            60
        )
        assert files(tmp_path) == []
        assert agents(service) == {}

    assert receipt.existed
    assert (last.code, last.status) == ("erased", 421)


def test_release_does_not_preserve_an_erased_record(tmp_path, model, monkeypatch):
    """Another node owns a later agent of that name: the old one must not follow its epoch."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        refusal = Refusal(monkeypatch, "erase_record")
        with pytest.raises(FabricError, match="the drive refused"):
            erase(service, "alice")
        call(
            service,
            ReleaseAgent(TENANT, "alice", 2_000, MigrationId("migration-9"), "node-b"),
            Done,
        )
        assert agents(service) == {"alice": 1}
        refusal.is_mended = True
        erase(service, "alice")
        assert agents(service) == {}


def test_erasure_removes_blocks_of_an_unfinished_migration(tmp_path, model):
    with (
        running(tmp_path, model, "node-b") as source,
        running(tmp_path, model, "node-a") as target,
    ):
        ask(source, PROMPT, agent="alice")
        name = MigrationId("migration-1")
        offer = call(source, OfferMigration(TENANT, "alice", 1, name, "node-a"), Offer)
        call(target, CopyBlocks(name, "node-b", offer), Copied)
        assert files(tmp_path, "blocks") != []
        receipts = erase(target, "alice"), erase(source, "alice")
        assert files(tmp_path, "blocks") == []
        with pytest.raises(FabricError, match="aborted"):
            call(target, CommitMigration(name, "node-b", offer, 2), Committed)
        assert source.node.resources.transfers.offers.agents() == frozenset()

    assert [receipt.existed for receipt in receipts] == [True, True]


def test_erasure_removes_temporaries_of_failed_writes(tmp_path, model, monkeypatch):
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        faults = FailingCalls(calls=("rename", "unlink")).install(monkeypatch)
        faults.is_broken = True
        assert not ask(service, PROMPT + "and on", agent="alice").finished.durable
        left = list(tmp_path.rglob(".tmp-*"))  # before the disk is mended
        faults.mend()
        erase(service, "alice")
        assert left
        assert list(tmp_path.rglob(".tmp-*")) == []
        assert files(tmp_path) == []


def test_unnamed_conversation_does_not_match_an_agent_being_erased(tmp_path, model, monkeypatch):
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        refusal = Refusal(monkeypatch, "erase_record")
        with pytest.raises(FabricError, match="the drive refused"):
            erase(service, "alice")
        reply = ask(service, PROMPT + "and on")
        refusal.is_mended = True

    assert reply.admitted.agent != "alice"


def test_node_with_refusing_disk_accepts_tombstones_and_serves(tmp_path, model, monkeypatch):
    """The node keeps its lease, and retries the erasure itself."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")
        ask(service, "quite another text, of nobody else " * 8, agent="bob")
        refusal = Refusal(monkeypatch, "erase_record")
        stone = tombstone(KEY, TENANT, "alice", 1_001, service.node.resources.clock.wall_s())
        known = call(service, ShareErasures((stone,)), KnownErasures)
        again = call(service, ShareErasures((stone,)), KnownErasures)
        assert files(tmp_path, "manifests") != []
        assert ask(service, PROMPT, agent="carol").admitted.cached_tokens == 0
        with pytest.raises(FabricError, match="is being erased"):
            ask(service, PROMPT, agent="alice", epoch=2_000)
        refusal.is_mended = True
        on_loop(service, service.node.commands.erasing.finish())  # as `node.upkeep` does
        assert len(files(tmp_path, "manifests")) == 2
        assert agents(service) == {"bob": 1, "carol": 1}

    assert (known.erased, known.agents_removed) == ((stone,), 0)
    assert again == known
    assert refusal.count >= 2
