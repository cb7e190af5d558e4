"""A real node keeps its tombstones, and nothing that they name."""

import errno
import shutil
import time

import pytest

from fabric.control import (
    AgentList,
    Describe,
    EraseAgent,
    EraseReceipt,
    KnownErasures,
    ListAgents,
    NodeView,
    ShareErasures,
)
from fabric.errors import FabricError, RetryLaterError, StaleEpochError
from fabric.ids import OperationId
from node.agent_store import AgentStore
from node.posix_disk import DiskError
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import LLAMA, write_model

PROMPT = "the cat sat on the mat and the dog sat on the log. " * 8
ERASED_S = 1_700_000_000.0
TRIES = 2
WAIT_POLLS = 6_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), LLAMA | {"num_hidden_layers": 2}))


def erase(service, agent, epoch=1_001):
    now_s = service.node.clock.wall_s()
    message = EraseAgent(OperationId("test-erase"), TENANT, agent, epoch, now_s)
    return call(service, message, EraseReceipt)


def agents(service):
    return {
        item.view.agent: item.view.epoch for item in call(service, ListAgents(), AgentList).agents
    }


def blocks(folder):
    return sorted(path.name for path in folder.glob("node-a/*/blocks/*.full"))


def test_what_was_erased_does_not_come_back_from_an_old_folder(tmp_path, model):
    """A restored backup, another model's folder, a disk that lost its last writes: all the same."""
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
        anew = ask(service, PROMPT, agent="carol")
        late = erase(service, "carol", receipt.tombstone.epoch)
        after = agents(service)

    assert receipt.existed
    assert receipt.tombstone.epoch == 1_001
    assert not repeated.existed
    assert found == {"alice": 1, "bob": 1}
    assert len(blocks(tmp_path)) < len(before)
    assert anew.admitted.epoch == 1_002
    assert not late.existed, "an old DELETE that arrives late spares the new agent"
    assert after["carol"] == 1_002


def test_a_turn_that_was_sent_before_the_erasure_begins_no_new_agent(tmp_path, model):
    """The epoch above the erased ones was given to another node."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice", epoch=1)
        erase(service, "alice")
        for epoch in (1, 1_001):
            with pytest.raises(StaleEpochError, match="was erased"):
                ask(service, PROMPT, agent="alice", epoch=epoch)
            assert agents(service) == {}
        ask(service, PROMPT, agent="alice", epoch=1_003)
        with pytest.raises(StaleEpochError, match="was superseded"):
            ask(service, PROMPT, agent="alice", epoch=1)
        assert agents(service) == {"alice": 1_003}


@pytest.mark.parametrize("epoch", [0, 1, 1_002])
def test_no_turn_carries_an_erased_memory_beyond_its_erasure(tmp_path, model, epoch):
    """One that comes between the tombstone and the removal finds the agent still there."""
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice", epoch=1)
        node = service.node
        node.erased.note(TENANT, "alice", 1_001, node.clock.wall_s())
        with pytest.raises(RetryLaterError, match="being erased"):
            ask(service, PROMPT, agent="alice", epoch=epoch)
        assert erase(service, "alice").existed
        assert agents(service) == {}


def test_a_running_node_removes_what_it_is_told_of(tmp_path, model):
    with (
        running(tmp_path, model, "node-a") as away,
        running(tmp_path, model, "node-b") as here,
    ):
        for service in (away, here):
            ask(service, PROMPT, agent="alice")
        receipt = erase(here, "alice", 5)
        known = call(here, ShareErasures(()), KnownErasures)
        for removed in (1, 0):
            told = call(away, ShareErasures(known.erased), KnownErasures)
            assert (told.erased, told.agents_removed) == (known.erased, removed)
        views = [call(service, Describe(), NodeView) for service in (away, here)]
        left = agents(away)

    assert known.erased == (receipt.tombstone,)
    assert left == {}
    assert views[0].erased == views[1].erased != 0
    with running(tmp_path, model, "node-a") as again:
        assert again.node.view().erased == views[0].erased


def test_damaged_tombstones_stop_nothing(tmp_path, model):
    with running(tmp_path, model) as service:
        for name in ("alice", "bob"):
            ask(service, PROMPT, agent=name)
            receipt = erase(service, name)
    path = tmp_path / "node-a" / "erased" / "agents" / receipt.tombstone.agent
    path.write_bytes(path.read_bytes()[:-1])
    with running(tmp_path, model) as service:
        assert len(service.node.erased.all) == 1


class Refusal:
    """One call of the store that the disk refuses until it is mended."""

    def __init__(self, monkeypatch, name):
        self.count, self.is_mended = 0, False
        real = getattr(AgentStore, name)

        def call(store, manifest):
            if self.is_mended:
                return real(store, manifest)
            self.count += 1
            message = "the drive refused"
            raise DiskError(message, errno.EIO)

        monkeypatch.setattr(AgentStore, name, call)


def wait_until(holds):
    """Let the node try again by itself."""
    for _ in range(WAIT_POLLS):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("nothing happened for a minute")


def test_an_erasure_that_the_disk_refused_is_finished_unasked(tmp_path, model, monkeypatch):
    """The tombstone is noted here as everywhere, so no greeting brings it up again."""
    monkeypatch.setattr("node.flusher.FLUSH_IDLE_S", 0.05)
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice", epoch=1)
        refusal = Refusal(monkeypatch, "erase_record")
        with pytest.raises(FabricError, match="the drive refused"):
            erase(service, "alice")
        wait_until(lambda: refusal.count > TRIES)  # and refused again
        with pytest.raises(RetryLaterError, match="being erased"):
            ask(service, PROMPT, agent="alice")
        refusal.is_mended = True
        wait_until(lambda: not agents(service))
        wait_until(lambda: not blocks(tmp_path))
        assert ask(service, PROMPT, agent="alice").admitted.epoch == 1_002


def test_what_stayed_behind_an_erased_record_goes_later(tmp_path, model, monkeypatch):
    monkeypatch.setattr("node.flusher.FLUSH_IDLE_S", 0.05)
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

    assert refusal.count == 1, "its record was gone"
