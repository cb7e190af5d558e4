"""The judge of a run accepts injected damage, and no damage by the node itself."""

import asyncio
import random
import weakref
from types import SimpleNamespace

import pytest

from fabric.kvcache.block_chain import block_spans
from fabric.record.manifest import OwnerState
from node.store.block_files import file_name
from node.store.block_store import BlockStore
from tests.sim.disk import SimDisk, SimDrive
from tests.sim.disk_judge import DiskJudge
from tests.sim.invariants import Invariants
from tests.sim.loop import Process, SimLoop
from tests.sim.memory import Memory
from tests.sim.model import FULL, SimCache
from tests.sim.rows import Growth
from tests.sim.world import LIMIT_S, _check_progress

TOKENS = list(range(40))


def one_block():
    """Store a block that no record needs, on a single node; return world, drive and file."""
    dice = random.Random(0)
    drive = SimDrive(dice)
    blocks = BlockStore(
        SimDisk(drive, Process("node-a#1", dice), None), FULL.spec, FULL.fingerprint
    )
    cache = SimCache(len(TOKENS))
    for token in TOKENS:
        cache.append(token)
    (span,) = block_spans(b"salt", FULL.fingerprint, TOKENS)
    ref = blocks.put(span.parent, span.block_hash, TOKENS, [cache.gather(0, len(TOKENS))])
    resources = SimpleNamespace(table=(), store=SimpleNamespace(blocks=blocks))
    node = SimpleNamespace(name="node-a", resources=resources)
    hosts = {"node-a": SimpleNamespace(node=node, drive=drive)}
    found = []
    world = SimpleNamespace(nodes=hosts, fail=found.append, found=found)
    return world, drive, file_name(ref)


@pytest.mark.parametrize("seed", range(8))  # cuts the file, or flips a bit of it
def test_damaged_block_that_was_never_read_is_accepted(seed):
    world, drive, _ = one_block()
    drive.random = random.Random(seed)
    drive.damage()
    Invariants(world)._check_records()
    assert world.found == []


def corrupt(drive, name):
    raw = drive.files[name]
    drive.files[name] = raw[:-1] + bytes([raw[-1] ^ 1])


def truncate(drive, name):
    drive.files[name] = drive.files[name][:-1]


def remove(drive, name):
    del drive.files[name]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (corrupt, "no fault did it"),
        (truncate, "indexed but not stored"),
        (remove, "indexed but not stored"),
    ],
)
def test_blocks_damaged_by_the_node_itself_are_a_violation(fault, message):
    world, drive, name = one_block()
    fault(drive, name)
    Invariants(world)._check_records()
    assert len(world.found) == 1
    assert message in world.found[0]


@pytest.mark.parametrize(("answered_s", "is_fine"), [(None, False), (500.0, True)])
def test_run_without_answers_is_a_hang_but_slow_answers_are_not(answered_s, is_fine):
    loop, found = SimLoop(), []
    asyncio.set_event_loop(loop)
    clients = SimpleNamespace(answered_s=0.0)
    world = SimpleNamespace(clients=clients, fail=found.append)
    loop.call_later(LIMIT_S, _check_progress, world, loop)
    if answered_s is not None:
        loop.call_later(answered_s, setattr, clients, "answered_s", answered_s)
    loop.run_until_complete(asyncio.sleep(LIMIT_S + 400.0))
    assert (found == []) is is_fine
    loop.run_until_complete(asyncio.sleep(LIMIT_S))
    asyncio.set_event_loop(None)
    loop.close()
    assert len(found) == 1


def test_delay_below_rounding_moves_the_clock():
    """Otherwise a task that waits for what is left of a time would repeat that for ever."""
    loop = SimLoop()
    loop.now_s = began_s = 1e6
    loop.call_later(1e-12, loop.stop)
    loop.run_forever()
    loop.close()
    assert loop.now_s > began_s


class Cache:
    def __init__(self, size_bytes):
        self.resident_bytes = size_bytes


def agent(cache, *, is_unsaved=False):
    return SimpleNamespace(cache=cache, is_unsaved=is_unsaved)


@pytest.mark.parametrize(("budget_bytes", "is_fine"), [(60, True), (59, False)])
@pytest.mark.parametrize("is_at_work", [False, True])
def test_one_cache_may_exceed_the_budget(is_at_work, budget_bytes, is_fine):
    """Caches that a disk has refused do not count, also while a turn continues them."""
    caches = [Cache(size) for size in (10, 20, 30, 40)]
    refused = Cache(50)
    table = [agent(caches[0]), agent(refused, is_unsaved=True), agent(None)]
    settings = SimpleNamespace(hot_bytes=budget_bytes)
    resources = SimpleNamespace(identity=SimpleNamespace(settings=settings))
    node = SimpleNamespace(resources=resources)
    host, found = SimpleNamespace(name="node-a", node=node), []
    host.caches = weakref.WeakSet([*caches, refused])
    judge = Memory(SimpleNamespace(nodes={"node-a": host}, fail=lambda _: found.append(1)))
    judge.note_refused(table)
    if is_at_work:
        judge.note_refused([*table[:1], agent(None)])
    Growth.count += 1
    judge.check_step()
    assert (found == []) is is_fine
    judge.note_refused([agent(refused)])  # saved now: it counts
    Growth.count += 1
    judge.check_step()
    assert found


@pytest.mark.parametrize("is_busy", [True, False])
def test_replica_whose_record_is_being_written_is_accepted(is_busy):
    record = SimpleNamespace(state=OwnerState.REPLICA, epoch=1)
    coming = SimpleNamespace(key=("red", "alice"), manifest=record, saved=None, is_busy=is_busy)
    node = SimpleNamespace(name="node-a", resources=SimpleNamespace(table=[coming]))
    host, found = SimpleNamespace(drive=SimDrive(random.Random(0))), []
    DiskJudge(SimpleNamespace(nodes={"node-a": host}, fail=found.append)).check_tables(node)
    assert len(found) == (not is_busy)
