"""The self-test disables reuse for wrong memory, but not for a disk that refuses."""

import errno

import pytest

from fabric.turn.generation import CacheTier
from node.store.block_store import BlockMissingError, BlockStore
from node.store.posix_disk import DiskError
from node.turn.decoding import Decoding
from tests.support.failing_disk import WRITES, FailingCalls
from tests.support.services import ask, running
from tests.support.small_node import BRIEF, SMALL, WORDS
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


@pytest.fixture(autouse=True)
def retry_soon(monkeypatch):
    monkeypatch.setattr("node.upkeep.FLUSH_IDLE_S", 0.05)
    monkeypatch.setattr("node.self_test.FLUSH_IDLE_S", 0.05)


def test_full_disk_during_start_does_not_disable_reuse(model, tmp_path, monkeypatch):
    with running(tmp_path, model, tries_everything=True) as service:
        first = ask(service, WORDS, agent="alice", **BRIEF)
    faults = FailingCalls(errno.ENOSPC, WRITES).install(monkeypatch)
    faults.is_broken = True
    with running(tmp_path, model, tries_everything=True) as service:
        node = service.node
        assert not node.background.self_tests.found.passed
        assert "not conclusive" in node.view().degraded
        assert node.health.reuses
        warm = ask(service, WORDS + first.text, agent="alice", **BRIEF)
        assert warm.admitted.cache is CacheTier.DISK
        faults.mend()
        wait_until(lambda: node.background.self_tests.found.passed)
        wait_until(lambda: node.health.degraded is None)
        assert node.resources.table.get(("_selftest", "selftest")) is None
        assert node.resources.store.blocks.check_integrity() == []


def test_temporary_read_failure_does_not_disable_reuse(model, tmp_path, monkeypatch):
    def fail_to_read(*_):
        raise BlockMissingError("too many open files")  # noqa: TRY003 - as the store says it

    with monkeypatch.context() as patch:
        patch.setattr(BlockStore, "load_into", fail_to_read)
        with running(tmp_path, model, tries_everything=True) as service:
            assert not service.node.background.self_tests.found.passed
            assert service.node.health.reuses
            patch.undo()
            wait_until(lambda: service.node.background.self_tests.found.passed)


@pytest.mark.parametrize("number", [1, 2])
def test_interrupted_self_test_does_not_disable_reuse(model, tmp_path, monkeypatch, number):
    """The test's turn is preempted like any other, or meets a stopping node."""
    submit, submitted = Decoding._submit, []

    def submit_unwanted(decoding, *args):
        submitted.append(decoding)
        if len(submitted) == number:
            decoding._unwanted.set()
        submit(decoding, *args)

    monkeypatch.setattr(Decoding, "_submit", submit_unwanted)
    with running(tmp_path, model, tries_everything=True) as service:
        node = service.node
        assert not node.background.self_tests.found.passed
        assert "not conclusive" in node.view().degraded
        assert node.health.reuses
        wait_until(lambda: node.background.self_tests.found.passed)


def test_repeated_self_test_detects_wrong_memory(model, tmp_path, monkeypatch):
    """The first test is inconclusive; the second reads bytes that were never written."""
    with running(tmp_path, model, tries_everything=True):
        pass
    faults = FailingCalls(errno.ENOSPC, WRITES).install(monkeypatch)
    faults.is_broken = True
    load = BlockStore.load_into

    def load_wrong_bytes(store, ref, parent, tokens, places):
        load(store, ref, parent, tokens, places)
        for place in places:
            place[...] = 1

    with running(tmp_path, model, tries_everything=True) as service:
        assert service.node.health.reuses
        monkeypatch.setattr(BlockStore, "load_into", load_wrong_bytes)
        faults.mend()
        wait_until(lambda: not service.node.health.reuses)
        assert "differently" in service.node.background.self_tests.found.detail


def test_leftovers_of_an_earlier_self_test_are_removed_first(model, tmp_path, monkeypatch):
    with running(tmp_path, model, tries_everything=True) as service:
        monkeypatch.setattr(service.node.resources.store, "erase_record", lambda *_: [])
        service.node.background.self_tests.is_sure = False
        wait_until(lambda: service.node.background.self_tests.is_sure)
    with running(tmp_path, model, tries_everything=True) as service:
        assert service.node.background.self_tests.found.passed
        assert list(service.node.resources.table) == []
        assert service.node.resources.store.blocks.total_bytes == 0


def test_blocks_of_a_failed_cleanup_are_released_once(model, tmp_path, monkeypatch):
    """The record is removed, the blocks by a later sweep; until then the test is repeated."""
    refusals = []

    def refuse(_):
        refusals.append(1)
        message = "Input/output error"
        raise DiskError(message, errno.EIO)

    with running(tmp_path, model, tries_everything=True) as service:
        node = service.node
        blocks = node.resources.store.blocks
        with monkeypatch.context() as patch:
            patch.setattr(BlockStore, "sweep", refuse)
            node.background.self_tests.is_sure = False
            wait_until(lambda: len(refusals) > 2)
            wait_until(lambda: "not conclusive" in (node.health.degraded or ""))
        wait_until(
            lambda: node.background.self_tests.is_sure and node.background.self_tests.found.passed
        )
        assert node.health.failed_rounds == 0
        wait_until(lambda: node.health.degraded is None)
        blocks.sweep()
        assert blocks.total_bytes == 0
        assert blocks.check_integrity() == []
