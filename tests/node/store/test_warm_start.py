"""After a start, shared blocks are read, the most shared first."""

import asyncio
from unittest import mock

import pytest

from fabric.ids import NodeName
from node.limits import WARM_START_STEP_S
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.store import warm_start
from node.store.block_store import BlockStore
from node.store.posix_disk import PosixDisk
from node.store.warm_start import WarmStart
from tests.support.blocks import FINGERPRINT, SPEC, make_block


@pytest.fixture
def blocks():
    return [make_block(seed, 200) for seed in range(4)]


@pytest.fixture
def store(tmp_path, blocks):
    """Store blocks that 1, 3, 2 and no records refer to."""
    disk = PosixDisk(tmp_path / "root", "none")
    store = BlockStore(disk, SPEC, FINGERPRINT)
    for block, count in zip(blocks, (1, 3, 2, 0), strict=True):
        block.put_into(store)
        for _ in range(count):
            store.retain([block.ref])
    yield store
    disk.close()


def warm(store, monkeypatch, steps, *, busy=False):
    """Take steps of one block each; return what they read, and the last wait."""
    monkeypatch.setattr(warm_start, "WARM_START_BYTES_PER_S", 1)
    health = Health(NodeName("node-a"))
    turns = LiveTurns(health)
    if busy:
        turns.add(mock.Mock())
    workers, seen = Workers(1), []
    verify = store.verify
    monkeypatch.setattr(store, "verify", lambda refs: (seen.extend(refs), verify(refs))[1])
    starting = WarmStart(workers, store, turns, health)
    waits = [asyncio.run(starting.step()) for _ in range(steps)]
    workers.close()
    return seen, waits


def test_shared_blocks_are_read_most_shared_first(store, blocks, monkeypatch):
    seen, waits = warm(store, monkeypatch, 4)
    assert seen == [blocks[1].ref, blocks[2].ref]
    assert waits[0] == store.sizes()[blocks[1].ref]  # at this rate in bytes per second
    assert waits[2] == waits[3] > 3_600


def test_warm_start_waits_for_turns(store, monkeypatch):
    assert warm(store, monkeypatch, 2, busy=True) == ([], [WARM_START_STEP_S] * 2)


def test_warm_start_reads_within_its_limit(store, blocks):
    one = store.sizes()[blocks[0].ref]
    assert [ref for ref, _ in store.shared(one)] == [blocks[1].ref]
    assert [ref for ref, _ in store.shared(2 * one)] == [blocks[1].ref, blocks[2].ref]


def test_warm_start_finds_a_damaged_block(tmp_path, store, blocks, monkeypatch):
    for path in tmp_path.rglob("*.full"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    warm(store, monkeypatch, 2)
    assert not store.has(blocks[1].ref)
    assert store.has(blocks[0].ref)
