"""Encryption at rest: nothing readable on disk, nothing lost, and no doubt survives a read."""

import random

import pytest

from fabric.control import Done, Flush
from fabric.errors import CorruptDataError, FatalError
from fabric.generation import CacheTier
from node.fsck import main as fsck
from node.launch import CLUSTER_KEY_FILE
from node.posix_disk import PosixDisk
from node.sealed_disk import (
    CHUNK_BYTES,
    HEAD_BYTES,
    MAGIC,
    MARKER,
    SEALED_CHUNK_BYTES,
    SealedDisk,
    open_disk,
    sealed_bytes,
)
from tests.support.services import KEY, ask, call, migrate, running
from tests.support.tiny_models import LLAMA, write_model

CANARY = "otter lantern quartz"
OTHER_KEY = b"o" * 32
SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 17 * CHUNK_BYTES + 5]


@pytest.fixture
def disk(tmp_path):
    made = open_disk(tmp_path, "none", KEY, seals=True)
    yield made
    made.close()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(disk, size):
    whole = random.Random(size).randbytes(size)
    disk.publish("blocks/a", [memoryview(whole)[: size // 3], whole[size // 3 :]])
    raw = (disk.root / "blocks/a").read_bytes()
    got = bytearray(size)

    assert disk.read("blocks/a", size) == whole
    assert disk.size_bytes("blocks/a") == size
    assert len(raw) == sealed_bytes(size)
    for offset in {0, 1, size // 2, max(0, size - 1), CHUNK_BYTES, size}:
        want = whole[offset : offset + 70_000]
        buffers = [memoryview(got)[:3], memoryview(bytearray(0)), memoryview(got)[3:70_000]]
        count = disk.read_into("blocks/a", offset, buffers)
        assert count == min(len(want), size)
        assert got[:count] == want[:count]
    if size:
        with pytest.raises(CorruptDataError):
            disk.read("blocks/a", size - 1)
    if size > 8:
        assert whole[:8] not in raw


def test_the_same_bytes_never_look_the_same(disk):
    for name in ("a", "b", "a"):
        disk.publish(name, [b"x" * 100])
    one, two = ((disk.root / name).read_bytes() for name in "ab")
    disk.publish("a", [b"x" * 100])
    three = (disk.root / "a").read_bytes()

    assert len({raw[HEAD_BYTES:] for raw in (one, two, three)}) == 3


def test_every_change_of_a_file_is_found(disk):
    size = 2 * CHUNK_BYTES + 100
    disk.publish("a", [random.Random(3).randbytes(size)])
    path = disk.root / "a"
    raw = path.read_bytes()
    one, two = HEAD_BYTES + SEALED_CHUNK_BYTES, HEAD_BYTES + 2 * SEALED_CHUNK_BYTES
    changed = [raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :] for at in range(8, HEAD_BYTES)]
    rng = random.Random(5)
    spots = [HEAD_BYTES, one - 1, one, two, len(raw) - 1]
    spots += [rng.randrange(HEAD_BYTES, len(raw)) for _ in range(30)]
    changed += [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in spots]
    changed += [
        raw[:end] for end in (HEAD_BYTES, HEAD_BYTES + 1, one - 1, one, one + 5, two, len(raw) - 1)
    ]
    changed += [raw[:HEAD_BYTES] + raw[one:two] + raw[HEAD_BYTES:one] + raw[two:]]  # exchanged
    changed += [raw[:one] + raw[two:], raw[:one] + raw[HEAD_BYTES:one] + raw[one:]]
    for wrong in changed:
        path.write_bytes(wrong)
        with pytest.raises(CorruptDataError):
            disk.read("a", size)
        with pytest.raises(CorruptDataError):
            disk.read_into("a", 0, [memoryview(bytearray(size))])


def test_files_of_both_kinds_lie_side_by_side(tmp_path):
    plain = PosixDisk(tmp_path, "none")
    plain.publish("blocks/old", [b"old" * 50_000])
    plain.close()
    on = open_disk(tmp_path, "none", KEY, seals=True)
    on.publish("blocks/new", [b"new"])
    assert (on.read("blocks/old", 150_000), on.size_bytes("blocks/old")) == (
        b"old" * 50_000,
        150_000,
    )
    assert isinstance(on, SealedDisk)
    assert on.seal_all() == 1
    assert on.seal_all() == 0
    raw = (tmp_path / "blocks/old").read_bytes()
    assert raw.startswith(MAGIC)
    assert b"oldold" not in raw
    on.close()
    off = open_disk(tmp_path, "none", KEY, seals=False)
    off.publish("blocks/newest", [b"newest"])
    assert [off.read(f"blocks/{n}", 150_000)[:3] for n in ("old", "new", "newest")] == [
        b"old", b"new", b"new",
    ]  # fmt: skip
    assert (tmp_path / "blocks/newest").read_bytes() == b"newest"
    off.close()
    for key in (OTHER_KEY, None):
        for seals in (True, False, None):
            with pytest.raises(FatalError):
                open_disk(tmp_path, "none", key, seals=seals)


def test_without_the_setting_nothing_changes(tmp_path):
    for seals in (False, None):
        disk = open_disk(tmp_path, "none", KEY, seals=seals)
        assert type(disk) is PosixDisk
        disk.close()
    assert list(tmp_path.iterdir()) == []


def everything(folder) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_whole_node_on_an_encrypted_disk(tmp_path, capsys):
    """Turned on over plain files: evicted, restarted, moved; the same answers, nothing readable."""
    model = str(write_model(tmp_path / "llama", LLAMA))
    messages = [{"role": "user", "content": f"{CANARY} " * 60}]
    folder = tmp_path / "nodes" / "node-a"
    with running(tmp_path / "nodes", model) as plain:
        first = ask(plain, messages, agent="a", max_tokens=4)
        assert CANARY.encode() in everything(folder)
    with running(tmp_path / "nodes", model, encrypt_at_rest=True) as sealed:
        assert CANARY.encode() not in everything(folder)
        warm = ask(sealed, messages, agent="a", max_tokens=4)
        call(sealed, Flush(drop_hot=True), Done)
        again = ask(sealed, messages, agent="a", max_tokens=4)
        other = ask(sealed, messages, agent="b", max_tokens=4)
        assert sealed.node.store.blocks.check_integrity() == []
        assert sealed.node.store.blocks.scrub(1 << 30).damaged == ()
        with running(tmp_path / "elsewhere", model, "node-b") as target:
            copied = migrate(sealed, target, "a", 1)
            moved = ask(target, messages, agent="a", max_tokens=4, epoch=2)
    assert first.text == warm.text == again.text == other.text == moved.text
    caches = [reply.admitted.cache for reply in (warm, again, moved)]
    assert caches == [CacheTier.DISK, CacheTier.DISK, CacheTier.PEER]
    assert copied.blocks_sent > 0
    assert CANARY.encode() not in everything(folder)
    assert [p.name for p in folder.rglob(MARKER)] == [MARKER]
    key_file = tmp_path / CLUSTER_KEY_FILE
    key_file.write_text(KEY.hex())
    key_file.chmod(0o600)
    argv = ["--data", str(tmp_path), "--node", "node-a"]
    assert fsck(argv) == 0, capsys.readouterr()
    key_file.write_text(OTHER_KEY.hex())
    assert fsck(argv) == 2
