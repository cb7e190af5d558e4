import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import CorruptDataError, FabricError, RejectedError
from node.limits import QUARANTINE_FILES_MAX
from node.store.posix_disk import DiskError, PosixDisk


@pytest.fixture
def disk(tmp_path):
    disk = PosixDisk(tmp_path / "root", "none")
    yield disk
    disk.close()


def files_below(root) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def test_unflushed_removal_is_flushed_on_retry(tmp_path, monkeypatch):
    disk = PosixDisk(tmp_path / "root", "full")
    disk.publish("blocks/a", [b"x"])
    flushed = []

    def fail(_at, _durability):
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr("node.store.posix_disk.flush", fail)
    with pytest.raises(DiskError):
        disk.remove("blocks/a")
    monkeypatch.setattr("node.store.posix_disk.flush", lambda at, _: flushed.append(at))
    assert not disk.remove("blocks/a")
    assert len(flushed) == 1
    assert not disk.remove("blocks/a")
    assert len(flushed) == 1
    disk.close()


def test_published_file_is_read(disk):
    disk.publish("blocks/a.blk", [b"one", bytearray(b"two"), memoryview(b"three")])

    assert disk.read("blocks/a.blk", 100) == b"onetwothree"
    assert disk.size_bytes("blocks/a.blk") == 11
    assert disk.list_names("blocks") == ["a.blk"]


def test_publish_replaces_the_whole_file(disk):
    disk.publish("a", [b"a long one"])
    disk.publish("a", [b"short"])
    assert disk.read("a", 100) == b"short"
    assert files_below(disk.root) == ["a"]


def test_open_descriptor_keeps_reading_the_old_content(disk):
    disk.publish("a", [b"old"])
    descriptor = disk.open_payload("a")
    disk.publish("a", [b"new"])
    disk.remove("a")
    assert os.read(descriptor, 10) == b"old"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(descriptor, b"x")
    os.close(descriptor)


@pytest.mark.parametrize("parts_count", [0, 1, 1023, 1024, 1025, 3000])
def test_files_of_many_parts_are_written_and_read(disk, parts_count):
    parts = [bytes([i % 251]) * (i % 7) for i in range(parts_count)]
    disk.publish("a", parts)
    whole = b"".join(parts)
    assert disk.read("a", 1 << 20) == whole

    buffers = [memoryview(bytearray(len(part))) for part in parts]
    assert disk.read_into("a", 0, buffers) == len(whole)
    assert b"".join(buffers) == whole


def test_wide_parts_are_written_as_bytes(disk):
    words = memoryview(bytearray(range(64))).cast("I", (4, 4))
    disk.publish("a", [words])
    assert disk.read("a", 100) == bytes(range(64))


def test_short_reads_and_writes_are_continued(disk, monkeypatch):
    writev, readv = os.writev, os.readv

    def transfer_three_bytes(call, descriptor, views):
        first = next(view for view in views if len(view))
        return call(descriptor, [memoryview(first).cast("B")[:3]])

    monkeypatch.setattr(os, "writev", lambda fd, views: transfer_three_bytes(writev, fd, views))
    monkeypatch.setattr(os, "readv", lambda fd, views: transfer_three_bytes(readv, fd, views))
    disk.publish("a", [b"0123456789", b"", b"abcdefgh"])
    buffers = [memoryview(bytearray(size)) for size in (1, 9, 8)]

    assert disk.read_into("a", 0, buffers) == 18
    assert b"".join(buffers) == b"0123456789abcdefgh"
    assert disk.read("a", 18) == b"0123456789abcdefgh"


def test_zero_byte_write_is_an_error(disk, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda fd, views: 0)
    with pytest.raises(DiskError, match="nothing was written"):
        disk.publish("a", [b"x"])


def test_read_into_stops_at_the_end(disk):
    disk.publish("a", [b"0123456789"])
    buffer = bytearray(b"--------")
    assert disk.read_into("a", 6, [memoryview(buffer)]) == 4
    assert buffer == b"6789----"
    assert disk.read_into("a", 100, [memoryview(buffer)]) == 0


def test_read_over_the_limit_is_corrupt(disk):
    disk.publish("a", [b"0123456789"])
    assert disk.read("a", 10) == b"0123456789"
    with pytest.raises(CorruptDataError, match="over the limit"):
        disk.read("a", 9)


def test_missing_files_are_reported_or_ignored(disk):
    for call in (
        lambda: disk.read("blocks/a", 1),
        lambda: disk.read_into("blocks/a", 0, []),
        lambda: disk.size_bytes("blocks/a"),
        lambda: disk.open_payload("blocks/a"),
        lambda: disk.size_bytes("a"),
    ):
        with pytest.raises(FileNotFoundError):
            call()
    assert disk.list_names("blocks") == []
    assert not disk.remove("blocks/a")
    assert not disk.remove("a")
    disk.publish("blocks/b", [])
    disk.quarantine("blocks/a", "was never there")
    assert disk.list_names("quarantine") == []


def test_remove_all_counts_existing_files(disk):
    for name in ("a", "blocks/b", "blocks/c"):
        disk.publish(name, [b"x"])
    assert disk.remove_all(["a", "blocks/b", "blocks/none", "none/b"]) == 2
    assert files_below(disk.root) == ["blocks/c"]


BAD_NAMES = [
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../a",
    "blocks/../a",
    "blocks/..",
    "blocks/",
    "blocks//a",
    "a/b/c",
    "a\0b",
    "a\n",
    "A",
    ".tmp-1",
    "blocks/.tmp-1",
    "-a",
    "é",
    "a b",
    "a" * 201,
    "~",
    "a\\b",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_rejected(disk, name):
    for call in (
        lambda: disk.publish(name, [b"x"]),
        lambda: disk.read(name, 1),
        lambda: disk.read_into(name, 0, []),
        lambda: disk.size_bytes(name),
        lambda: disk.open_payload(name),
        lambda: disk.remove(name),
        lambda: disk.quarantine(name, "x"),
        lambda: disk.list_names(f"x/{name}"),
    ):
        with pytest.raises(RejectedError):
            call()
    assert files_below(disk.root) == []


@settings(database=None, max_examples=200)
@given(st.text(max_size=20) | st.from_regex(r"[a./-]{1,12}"))
def test_no_name_escapes_the_root(tmp_path_factory, name):
    outer = tmp_path_factory.getbasetemp() / "fuzz"
    disk = PosixDisk(outer / "root", "none")
    try:
        disk.publish(name, [b"x"])
        assert disk.read(name, 1) == b"x"
    except (RejectedError, DiskError):  # DiskError: a directory has that name already
        pass
    finally:
        disk.close()
    assert {path.name for path in outer.iterdir()} == {"root"}


def test_files_and_folders_are_private(disk):
    previous = os.umask(0)
    try:
        disk.publish("blocks/a", [b"x"])
    finally:
        os.umask(previous)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in disk.root.rglob("*")}
    assert modes == {disk.root / "blocks": 0o700, disk.root / "blocks" / "a": 0o600}
    assert stat.S_IMODE(disk.root.stat().st_mode) == 0o700


def test_open_directories_are_made_private(tmp_path):
    (tmp_path / "root" / "blocks").mkdir(parents=True)
    for path in (tmp_path / "root", tmp_path / "root" / "blocks"):
        path.chmod(0o755)
    disk = PosixDisk(tmp_path / "root")
    disk.list_names("blocks")
    disk.close()
    for path in (tmp_path / "root", tmp_path / "root" / "blocks"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_root_writable_by_others_is_refused(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o777)
    with pytest.raises(DiskError, match="other users"):
        PosixDisk(tmp_path / "root")


def test_links_are_followed_at_the_root_only(tmp_path, disk):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(disk.root)
    linked = PosixDisk(tmp_path / "link", "none")
    linked.publish("blocks/a", [b"x"])
    (disk.root / "blocks" / "s").symlink_to(outside / "secret")
    (disk.root / "planted").symlink_to(outside)

    for call in (
        lambda: linked.read("blocks/s", 100),
        lambda: linked.read_into("blocks/s", 0, []),
        lambda: linked.size_bytes("blocks/s"),
        lambda: linked.open_payload("blocks/s"),
    ):
        with pytest.raises(CorruptDataError):
            call()
    for call in (
        lambda: linked.read("planted/secret", 100),
        lambda: linked.publish("planted/new", [b"x"]),
        lambda: linked.list_names("planted"),
    ):
        with pytest.raises(DiskError):
            call()
    linked.publish("blocks/s", [b"replaced"])
    linked.close()
    assert (outside / "secret").read_bytes() == b"secret"
    assert files_below(outside) == ["secret"]


def test_pipes_and_directories_are_not_read_as_files(disk):
    disk.publish("blocks/a", [b"x"])
    os.mkfifo(disk.root / "blocks" / "pipe")
    (disk.root / "blocks" / "folder").mkdir()
    before = len(list(Path("/dev/fd").iterdir()))
    for name in ("blocks/pipe", "blocks/folder"):
        for call in (disk.open_payload, disk.size_bytes, lambda name: disk.read(name, 1)):
            with pytest.raises(FabricError):
                call(name)
    assert disk.list_names("blocks") == ["a", "pipe"]
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_recover_removes_only_temporaries(tmp_path, disk):
    disk.publish("blocks/a", [b"x"])
    for name in (".tmp-old-1", "blocks/.tmp-old-2", ".DS_Store", "blocks/.DS_Store"):
        (disk.root / name).write_bytes(b"half")
    assert disk.list_names("blocks") == ["a"]

    assert disk.recover() == 2
    assert files_below(disk.root) == [".DS_Store", "blocks/.DS_Store", "blocks/a"]
    assert disk.recover() == 0


def test_root_is_owned_by_one_process(disk):
    disk.recover()
    other = PosixDisk(disk.root, "none")
    with pytest.raises(DiskError, match="in use by another"):
        other.recover()
    disk.close()
    assert other.recover() == 0
    other.close()


def test_closed_disk_refuses_reads_and_writes(tmp_path):
    disk = PosixDisk(tmp_path / "root")
    disk.publish("blocks/a", [b"x"])
    disk.close()
    disk.close()
    with pytest.raises(DiskError):
        disk.read("blocks/a", 1)
    with pytest.raises(DiskError):
        disk.publish("b", [b"x"])


def test_quarantine_keeps_file_and_reason(disk):
    disk.publish("blocks/a.blk", [b"bad"])
    disk.quarantine("blocks/a.blk", "Checksum does NOT match: /../ \0!")
    assert files_below(disk.root) == ["quarantine/a.blk.checksum-does-not-match"]
    assert disk.read("quarantine/a.blk.checksum-does-not-match", 3) == b"bad"


def test_quarantine_is_bounded(disk):
    for number in range(QUARANTINE_FILES_MAX + 5):
        disk.publish(f"blocks/{number:03}", [b"x"])
        disk.quarantine(f"blocks/{number:03}", "bad")
    kept = disk.list_names("quarantine")
    assert len(kept) == QUARANTINE_FILES_MAX
    assert kept[-1] == f"{QUARANTINE_FILES_MAX + 4:03}.bad"


def test_drive_reports_free_and_total_space(disk):
    drive = disk.drive()

    assert 0 < drive.free_bytes <= drive.total_bytes < 1 << 60


def test_flush_order_is_file_rename_directory_at_every_level(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def traced_fsync(fd):
        done.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    def traced_rename(*args, **kwargs):
        done.append("rename")
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "rename", traced_rename)
    for durability in ("full", "barrier", "none"):
        disk = PosixDisk(tmp_path / durability, durability)
        disk.publish("a", [b"x"])
        done.clear()
        disk.publish("a", [b"x"])
        flushed = ["file", "rename", "directory"]
        assert done == (["rename"] if durability == "none" else flushed)
        disk.close()


def test_concurrent_publishes_and_listings_are_consistent(disk):
    names = [f"blocks/{number:03}" for number in range(60)]
    missing = []

    def publish(mine):
        for name in mine:
            disk.publish(name, [name.encode()] * 50)
            if name.removeprefix("blocks/") not in disk.list_names("blocks"):
                missing.append(name)

    threads = [threading.Thread(target=publish, args=(names[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert missing == []
    assert all(disk.read(name, 1 << 20) == name.encode() * 50 for name in names)
    assert disk.recover() == 0
