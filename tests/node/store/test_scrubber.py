"""Stored blocks are read again in idle moments, at a budget, once a day."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fabric.errors import FabricError
from fabric.limits import SCRUB_IDLE_S, SCRUB_STEP_S
from fabric.settings import NodeSettings
from node.store.block_store import BlockStore
from node.store.posix_disk import PosixDisk
from node.store.scrubber import Scrubber
from tests.support.blocks import FINGERPRINT, SPEC, make_block

DAY_S = 24 * 3600.0


@dataclass
class FakeNode:
    """What a scrubber sees of a node; its clock moves by hand."""

    store: Any
    settings: NodeSettings
    now_s: float = 1_000.0
    turns: set = field(default_factory=set)
    is_draining: bool = False
    reuses: bool = True
    scrubbed_bytes: int = 0

    @property
    def clock(self):
        return SimpleNamespace(monotonic_s=lambda: self.now_s)

    async def in_worker(self, work):
        return work()

    def note_failed_round(self):
        pass


@pytest.fixture
def blocks():
    return [make_block(seed, 200) for seed in range(5)]


@pytest.fixture
def store(tmp_path, blocks):
    disk = PosixDisk(tmp_path / "root", "none")
    store = BlockStore(disk, SPEC, FINGERPRINT)
    for block in blocks:
        block.put_into(store)
    yield store
    disk.close()


@pytest.fixture
def node(store):
    # One block's bytes a second.
    settings = NodeSettings(scrub_bytes_per_s=store.total_bytes // 5, scrub_every_s=DAY_S)
    return FakeNode(SimpleNamespace(blocks=store), settings)


def after(node, scrubber, seconds: float) -> float:
    """Let time pass and take a step; return how long it wants to wait."""
    node.now_s += seconds
    return asyncio.run(scrubber.step())


def test_a_round_takes_its_time_and_comes_once_a_day(node, store):
    scrubber = Scrubber(node)
    one = store.total_bytes // 5
    assert after(node, scrubber, 0) == SCRUB_STEP_S  # idle from now on
    seen = []
    for _ in range(5):
        assert after(node, scrubber, SCRUB_IDLE_S) == pytest.approx(SCRUB_STEP_S)
        seen.append(node.scrubbed_bytes)
    assert seen == [one * n for n in range(1, 6)]

    for _ in range(100):
        assert after(node, scrubber, 60) <= SCRUB_IDLE_S
    assert node.scrubbed_bytes == 5 * one
    after(node, scrubber, DAY_S)
    assert node.scrubbed_bytes == 6 * one


def test_an_empty_store_is_no_round(node, store, blocks):
    store.abandon([block.ref for block in blocks])
    store.sweep()
    scrubber = Scrubber(node)
    after(node, scrubber, 0)
    assert after(node, scrubber, SCRUB_IDLE_S) == SCRUB_IDLE_S
    blocks[0].put_into(store)
    after(node, scrubber, SCRUB_IDLE_S)
    assert node.scrubbed_bytes == store.total_bytes


def test_a_block_over_the_budget_is_paid_back(node, store):
    node.settings = NodeSettings(scrub_bytes_per_s=store.total_bytes // 50)
    scrubber = Scrubber(node)
    after(node, scrubber, 0)
    assert after(node, scrubber, SCRUB_IDLE_S) == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("busy", ["turn", "draining"])
def test_turns_come_first(node, busy):
    scrubber = Scrubber(node)
    after(node, scrubber, 0)
    if busy == "turn":
        node.turns.add(object())
    else:
        node.is_draining = True
    after(node, scrubber, SCRUB_IDLE_S)
    node.turns.clear()
    node.is_draining = False
    after(node, scrubber, SCRUB_IDLE_S)  # it has only just become idle
    assert node.scrubbed_bytes == 0
    after(node, scrubber, SCRUB_IDLE_S)
    assert node.scrubbed_bytes > 0


def test_damage_is_found_before_anybody_reads_it(node, store, blocks):
    bad = blocks[2]
    path = store._disk.root / "blocks" / f"{bad.ref.name}.full"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    node.settings = NodeSettings(scrub_bytes_per_s=store.total_bytes)
    scrubber = Scrubber(node)
    after(node, scrubber, 0)
    after(node, scrubber, SCRUB_IDLE_S)

    assert store.damaged_count == 1
    assert not store.has(bad.ref)
    assert len(store._disk.list_names("quarantine")) == 1


@pytest.mark.parametrize(("settings", "reuses"), [({"scrub_bytes_per_s": 0}, True), ({}, False)])
def test_it_may_be_switched_off(node, settings, reuses):
    node.settings, node.reuses = NodeSettings(**settings), reuses

    async def start():
        scrubber = Scrubber(node)
        scrubber.start()
        assert len(asyncio.all_tasks()) == 1
        await scrubber.stop()

    asyncio.run(start())


def test_a_failure_does_not_end_it(node, monkeypatch):
    """The loop goes on after an error, and ends when it is told to."""
    monkeypatch.setattr("node.store.scrubber.SCRUB_STEP_S", 0.001)
    monkeypatch.setattr("node.background_loop.LOOP_RETRY_S", 0.001)
    failures = asyncio.Semaphore(0)

    async def failing(_scrubber):
        failures.release()
        message = "cannot"
        raise FabricError(message)

    monkeypatch.setattr(Scrubber, "step", failing)

    async def run():
        scrubber = Scrubber(node)
        scrubber.start()
        for _ in range(3):
            await failures.acquire()
        await scrubber.stop()
        await scrubber.stop()

    asyncio.run(run())
