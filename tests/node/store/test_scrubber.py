"""Stored blocks are read again in idle moments, at a budget, once a day."""

import asyncio
from dataclasses import dataclass, field

import pytest

from fabric.errors import FabricError
from fabric.ids import NodeName
from fabric.settings import NodeSettings
from node.limits import SCRUB_IDLE_S, SCRUB_STEP_S
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.store.block_store import BlockStore
from node.store.posix_disk import PosixDisk
from node.store.scrubber import Scrubber
from tests.node.fake_engine import FakeClock
from tests.support.blocks import FINGERPRINT, SPEC, make_block

DAY_S = 24 * 3600.0


@dataclass
class Rig:
    """The dependencies of a scrubber, with a clock that moves by hand."""

    blocks: BlockStore
    settings: NodeSettings
    workers: Workers
    clock: FakeClock = field(default_factory=FakeClock)
    health: Health = field(default_factory=lambda: Health(NodeName("node-a")))
    turns: LiveTurns = field(init=False)

    def __post_init__(self):
        self.turns = LiveTurns(self.health)

    def scrubber(self):
        return Scrubber(
            self.settings, self.clock, self.workers, self.blocks, self.turns, self.health
        )


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
def rig(store):
    # One block's bytes a second.
    settings = NodeSettings(scrub_bytes_per_s=store.total_bytes // 5, scrub_every_s=DAY_S)
    workers = Workers(1)
    yield Rig(store, settings, workers)
    workers.close()


def step_after(rig, scrubber, seconds: float) -> float:
    """Advance the clock and take a step; return its wait until the next one."""
    rig.clock.now_s += seconds
    return asyncio.run(scrubber.step())


def test_scrub_round_keeps_its_rate_and_daily_interval(rig, store):
    scrubber = rig.scrubber()
    one = store.total_bytes // 5
    assert step_after(rig, scrubber, 0) == SCRUB_STEP_S  # idle from now on
    seen = []
    for _ in range(5):
        assert step_after(rig, scrubber, SCRUB_IDLE_S) == pytest.approx(SCRUB_STEP_S)
        seen.append(scrubber.scrubbed_bytes)
    assert seen == [one * n for n in range(1, 6)]

    for _ in range(100):
        assert step_after(rig, scrubber, 60) <= SCRUB_IDLE_S
    assert scrubber.scrubbed_bytes == 5 * one
    step_after(rig, scrubber, DAY_S)
    assert scrubber.scrubbed_bytes == 6 * one


def test_empty_store_is_not_counted_as_a_round(rig, store, blocks):
    store.abandon([block.ref for block in blocks])
    store.sweep()
    scrubber = rig.scrubber()
    step_after(rig, scrubber, 0)
    assert step_after(rig, scrubber, SCRUB_IDLE_S) == SCRUB_IDLE_S
    blocks[0].put_into(store)
    step_after(rig, scrubber, SCRUB_IDLE_S)
    assert scrubber.scrubbed_bytes == store.total_bytes


def test_block_over_the_budget_lengthens_the_wait(rig, store):
    rig.settings = NodeSettings(scrub_bytes_per_s=store.total_bytes // 50)
    scrubber = rig.scrubber()
    step_after(rig, scrubber, 0)
    assert step_after(rig, scrubber, SCRUB_IDLE_S) == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("busy", ["turn", "draining"])
def test_scrubber_waits_for_turns_and_draining(rig, busy):
    scrubber, turn = rig.scrubber(), object()
    step_after(rig, scrubber, 0)
    if busy == "turn":
        rig.turns.add(turn)
    else:
        rig.health.is_draining = True
    step_after(rig, scrubber, SCRUB_IDLE_S)
    rig.turns.discard(turn)
    rig.health.is_draining = False
    step_after(rig, scrubber, SCRUB_IDLE_S)  # the node became idle only now
    assert scrubber.scrubbed_bytes == 0
    step_after(rig, scrubber, SCRUB_IDLE_S)
    assert scrubber.scrubbed_bytes > 0


def test_scrubber_quarantines_a_damaged_block(rig, store, blocks):
    bad = blocks[2]
    path = store._disk.root / "blocks" / f"{bad.ref.name}.full"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    rig.settings = NodeSettings(scrub_bytes_per_s=store.total_bytes)
    scrubber = rig.scrubber()
    step_after(rig, scrubber, 0)
    step_after(rig, scrubber, SCRUB_IDLE_S)

    assert store.damaged_count == 1
    assert not store.has(bad.ref)
    assert len(store._disk.list_names("quarantine")) == 1


@pytest.mark.parametrize(("settings", "reuses"), [({"scrub_bytes_per_s": 0}, True), ({}, False)])
def test_scrubber_is_off_by_setting_or_without_reuse(rig, settings, reuses):
    rig.settings, rig.health.problem = NodeSettings(**settings), None if reuses else "lost"

    async def start():
        scrubber = rig.scrubber()
        scrubber.start()
        assert len(asyncio.all_tasks()) == 1
        await scrubber.stop()

    asyncio.run(start())


def test_scrubber_continues_after_a_failure(rig, monkeypatch):
    """The loop continues after an error, and ends on stop."""
    monkeypatch.setattr("node.store.scrubber.SCRUB_STEP_S", 0.001)
    monkeypatch.setattr("node.background_loop.LOOP_RETRY_S", 0.001)
    failures = asyncio.Semaphore(0)

    async def fail(_scrubber):
        failures.release()
        message = "cannot"
        raise FabricError(message)

    monkeypatch.setattr(Scrubber, "step", fail)

    async def run():
        scrubber = rig.scrubber()
        scrubber.start()
        for _ in range(3):
            await failures.acquire()
        await scrubber.stop()
        await scrubber.stop()

    asyncio.run(run())
