"""A disk that fails at any operation: one clear error, no temporary file, no loss."""

import errno
import os
import resource
import stat
from contextlib import contextmanager
from itertools import count

import pytest

from fabric.errors import UNDECIDED, CorruptDataError, FabricError
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import DiskError, PosixDisk
from tests.faults.flows import A1, A2, World
from tests.faults.turns import HISTORY, problem_after_restart, take_turns
from tests.support.blocks import (
    CLUSTER_KEY,
    FINGERPRINT,
    SPEC,
    TENANT,
    make_block,
    make_manifest,
    refs_of,
)

BLOCK = make_block(1, 3)
NAME = f"blocks/{BLOCK.ref.name}.full"


def flip_bit(path):
    """Flip a bit of a file in place."""
    raw = bytearray(path.read_bytes())
    raw[12] ^= 16
    path.write_bytes(raw)


@pytest.fixture(autouse=True)
def skip_fsync(monkeypatch):
    """Make fsync do nothing: these tests fail calls, not the drive."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


CALLS = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "stat", "fstat", "readv", "lseek")


@contextmanager
def failing_call(monkeypatch, point: int, cause: int, numbers):
    """Make operation number `point` fail once with `cause`."""
    with monkeypatch.context() as patch:
        for name in CALLS:
            call = getattr(os, name)

            def counted(*args, _call=call, **kwargs):
                if next(numbers) == point:
                    raise OSError(cause, os.strerror(cause))
                return _call(*args, **kwargs)

            patch.setattr(os, name, counted)
        yield


class Enough(Exception):  # noqa: N818 - no error
    """The first turn is done."""


def first_turn(root):
    """Take one turn and stop, as if the process ended."""

    def stop(revision):
        if revision == 1:
            raise Enough

    disk = PosixDisk(root, "full")
    with pytest.raises(Enough):
        take_turns(disk, stop)
    disk.close()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    "cause", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.EROFS]
)
def test_every_failed_operation_leaves_a_recoverable_disk(tmp_path, monkeypatch, cause, restarted):
    """Each failing operation gives one clear error, no temporary and no loss; later turns work."""
    failures = 0
    for point in count():
        if restarted:
            first_turn(tmp_path / str(point))
        disk = PosixDisk(tmp_path / str(point), "full")
        promised = [int(restarted)]
        numbers = count()
        with failing_call(monkeypatch, point, cause, numbers):
            refusal = None
            try:
                take_turns(disk, promised.append)
            except DiskError as error:
                refusal = error
        if refusal is not None:
            failures += 1
            assert refusal.cause == cause
            assert refusal.is_full == (cause in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        left = [path.name for path in disk.root.rglob(".tmp-*")]
        assert left == [], f"operation {point}"
        promised.append(max(promised))
        take_turns(disk, promised.append)
        # Only a failing drive may lose a record, and only as a whole.
        assert promised == sorted(promised) or cause == errno.EIO
        assert problem_after_restart(disk, len(HISTORY)) is None, f"operation {point}"
        disk.close()
        if next(numbers) <= point:
            break
    assert point > 40
    assert failures > point - 10


@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EIO])
def test_failed_put_leaves_the_store_unchanged(tmp_path, monkeypatch, cause):
    for point in count():
        disk = PosixDisk(tmp_path / str(point), "full")
        store = BlockStore(disk, SPEC, FINGERPRINT)
        numbers = count()
        was_refused = False
        with failing_call(monkeypatch, point, cause, numbers):
            try:
                BLOCK.put_into(store)
            except DiskError:
                was_refused = True
        assert store.check_integrity() == [], f"operation {point}"
        assert store.has(BLOCK.ref) != was_refused
        assert disk.list_names("blocks") == ([] if was_refused else [NAME.split("/")[1]])
        assert BLOCK.put_into(store) == BLOCK.ref
        assert BLOCK.load_from(store) == BLOCK.kv
        store.abandon([BLOCK.ref])
        assert store.sweep().blocks_count == (1 if was_refused else 0)
        disk.close()
        if next(numbers) <= point:
            break
    assert point >= 7


@pytest.mark.parametrize("cause", [errno.EIO, errno.EMFILE])
def test_failed_load_is_a_miss(tmp_path, monkeypatch, cause):
    """A failing drive quarantines the block; a lack of descriptors does not."""
    misses = 0
    for point in count():
        disk = PosixDisk(tmp_path / str(point), "none")
        store = BlockStore(disk, SPEC, FINGERPRINT)
        BLOCK.put_into(store)
        numbers = count()
        with failing_call(monkeypatch, point, cause, numbers):
            try:
                assert BLOCK.load_from(store) == BLOCK.kv
            except CorruptDataError:
                misses += 1
                assert store.has(BLOCK.ref) == (cause == errno.EMFILE)
        disk.close()
        if next(numbers) <= point:
            break
    assert misses == point > 3


@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_failed_quarantine_still_drops_the_block(tmp_path, monkeypatch, cause):
    for point in range(30):
        disk = PosixDisk(tmp_path / str(point), "full")
        store = BlockStore(disk, SPEC, FINGERPRINT)
        BLOCK.put_into(store)
        flip_bit(disk.root / NAME)
        with failing_call(monkeypatch, point, cause, count()), pytest.raises(FabricError):
            BLOCK.load_from(store)
        if store.has(BLOCK.ref):  # the call failed before anything was read
            with pytest.raises(CorruptDataError):
                BLOCK.load_from(store)
        BLOCK.put_into(store)
        assert BLOCK.load_from(store) == BLOCK.kv
        assert store.check_integrity() == []
        disk.close()


def test_failed_fsync_is_not_retried(tmp_path, monkeypatch):
    """fsync reports lost pages once; a second call would succeed."""
    disk = PosixDisk(tmp_path / "root", "full")
    disk.publish("a", [b"old"])
    flushed_directories = []

    def fail(fd):
        flushed_directories.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(DiskError) as caught:
            disk.publish("a", [b"new"])
    assert caught.value.is_damage
    assert flushed_directories == [False]
    assert disk.read("a", 10) == b"old"
    assert [path.name for path in disk.root.iterdir()] == ["a"]
    disk.close()


def test_system_file_size_limit_is_reported_as_full(tmp_path):
    """The kernel itself returns EFBIG, first in the middle of a write."""
    disk = PosixDisk(tmp_path / "root", "full")
    store, records = BlockStore(disk, SPEC, FINGERPRINT), ManifestStore(disk, CLUSTER_KEY)
    record = make_manifest([BLOCK])
    BLOCK.put_into(store)
    store.retain(refs_of(record))
    records.publish(record)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    larger = make_block(9, 200)
    try:
        for limit_bytes in (20_000, 10, 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
            with pytest.raises(DiskError) as block_error:
                larger.put_into(store)
            assert block_error.value.is_full
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(disk.root.rglob(".tmp-*")) == []
    assert store.check_integrity() == []
    assert records.load_all() == [record]
    assert larger.put_into(store) == larger.ref
    assert larger.load_from(store) == larger.kv
    disk.close()


def test_evicted_agent_with_undecided_record_leaves_no_block(tmp_path, monkeypatch):
    """A save failed and could not be undone: the blocks of both records are removed."""
    disk = PosixDisk(tmp_path / "root", "full")
    world = World(disk, lambda _: None)
    world.save(A1)
    publish, left = disk.publish, [2]

    def late(name, parts):
        publish(name, parts)
        if name.startswith("manifests/") and left[0]:
            left[0] -= 1
            error = DiskError("cannot make durable", errno.EIO)
            error.is_in_place = True
            raise error

    monkeypatch.setattr(disk, "publish", late)
    with pytest.raises(DiskError) as caught:
        world.save(A2)
    assert caught.value.code == UNDECIDED
    assert world.store.doubtful_record((TENANT, A1.key)) == A2.record
    assert len(disk.list_names("blocks")) > len(A1.blocks)
    world.evict(A1)
    assert disk.list_names("blocks") == disk.list_names("manifests") == []
    disk.close()


def test_record_that_does_not_fit_leaves_the_old_one(tmp_path, monkeypatch):
    disk = PosixDisk(tmp_path / "root", "none")
    records = ManifestStore(disk, CLUSTER_KEY)
    records.publish(make_manifest([BLOCK]))
    for point in range(3):
        with failing_call(monkeypatch, point, errno.ENOSPC, count()), pytest.raises(DiskError):
            records.publish(make_manifest([BLOCK], revision=2))
    assert [record.revision for record in records.load_all()] == [1]
    disk.close()
