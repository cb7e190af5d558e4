"""Encryption at rest: nothing readable on disk, nothing lost, every change detected."""

import random
import tracemalloc
from contextlib import suppress

import pytest

from fabric.control.node_calls import Done, Flush
from fabric.errors import CorruptDataError, FatalError
from fabric.keys import CLUSTER_KEY
from fabric.limits import MIB
from fabric.turn.generation import CacheTier
from node.fsck.run import main as fsck
from node.store.block_store import BlockStore
from node.store.encrypted_disk import MARKER, EncryptedDisk, open_disk
from node.store.encrypted_file import (
    CHUNK_BYTES,
    ENCRYPTED_CHUNK_BYTES,
    HEAD_BYTES,
    MAGIC,
    TAG_BYTES,
)
from node.store.posix_disk import PosixDisk
from tests.support.blocks import FINGERPRINT, make_block, make_spec
from tests.support.services import KEY, ask, call, migrate, running
from tests.support.small_node import SMALL
from tests.support.tiny_models import LLAMA, write_model
from tests.support.waiting import wait_until

CANARY = "otter lantern quartz"
OTHER_KEY = b"o" * 32
SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 17 * CHUNK_BYTES + 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


@pytest.fixture
def disk(tmp_path):
    opened = open_disk(tmp_path, "none", KEY, encrypts=True)
    yield opened
    opened.close()


@pytest.mark.parametrize("size", SIZES)
def test_encrypted_file_round_trips(disk, size):
    whole = random.Random(size).randbytes(size)
    disk.publish("blocks/a", [memoryview(whole)[: size // 3], whole[size // 3 :]])
    raw = (disk.root / "blocks/a").read_bytes()
    got = bytearray(size)

    assert disk.read("blocks/a", size) == whole
    assert disk.size_bytes("blocks/a") == size
    assert len(raw) == HEAD_BYTES + size + max(1, -(-size // CHUNK_BYTES)) * TAG_BYTES
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


@pytest.mark.parametrize("part_bytes", [1_000, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_file_written_in_any_parts_is_the_same(disk, part_bytes):
    whole = random.Random(part_bytes).randbytes(3 * CHUNK_BYTES)
    disk.publish("a", [whole[at : at + part_bytes] for at in range(0, len(whole), part_bytes)])
    assert disk.read("a", len(whole)) == whole


def test_large_files_are_processed_in_bounded_memory(tmp_path):
    size, piece = 40 * MIB, memoryview(bytearray(MIB))
    plain = PosixDisk(tmp_path, "none")
    plain.publish("blocks/old", [bytes(size)])
    plain.close()
    disk = open_disk(tmp_path, "none", KEY, encrypts=True)
    whole = bytes(size)
    tracemalloc.start()
    try:
        assert disk.encrypt_all() == 1
        disk.publish("blocks/new", [whole])
        for name in ("blocks/old", "blocks/new"):
            lent = disk.lend(name, 0, size)
            for offset in range(0, size, MIB):
                lent.read_into(piece, offset)
            with pytest.raises(CorruptDataError, match="shorter"):
                lent.read_into(piece, size - 1)
            lent.close()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        disk.close()
    assert peak_bytes < 8 * MIB


def test_block_failing_to_decrypt_while_sent_is_quarantined(disk):
    store, block = BlockStore(disk, make_spec(), FINGERPRINT), make_block(1, 40)
    block.put_into(store)
    (path,) = (disk.root / "blocks").iterdir()
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    lent = store.open_payload(block.ref)
    with pytest.raises(CorruptDataError, match="decrypt"):
        lent.read_into(memoryview(bytearray(lent.length)), 0)
    lent.close()
    assert not store.has(block.ref)
    assert len(store.quarantined()) == 1


def test_equal_contents_have_different_ciphertexts(disk):
    for name in ("a", "b", "a"):
        disk.publish(name, [b"x" * 100])
    one, two = ((disk.root / name).read_bytes() for name in "ab")
    disk.publish("a", [b"x" * 100])
    three = (disk.root / "a").read_bytes()

    assert len({raw[HEAD_BYTES:] for raw in (one, two, three)}) == 3


def test_every_change_of_a_file_is_detected(disk):
    size = 2 * CHUNK_BYTES + 100
    disk.publish("a", [random.Random(3).randbytes(size)])
    path = disk.root / "a"
    raw = path.read_bytes()
    one, two = HEAD_BYTES + ENCRYPTED_CHUNK_BYTES, HEAD_BYTES + 2 * ENCRYPTED_CHUNK_BYTES
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


def test_plain_and_encrypted_files_coexist(tmp_path):
    plain = PosixDisk(tmp_path, "none")
    plain.publish("blocks/old", [b"old" * 50_000])
    plain.close()
    on = open_disk(tmp_path, "none", KEY, encrypts=True)
    on.publish("blocks/new", [b"new"])
    assert (on.read("blocks/old", 150_000), on.size_bytes("blocks/old")) == (
        b"old" * 50_000,
        150_000,
    )
    assert isinstance(on, EncryptedDisk)
    assert on.encrypt_all() == 1
    assert on.encrypt_all() == 0
    raw = (tmp_path / "blocks/old").read_bytes()
    assert raw.startswith(MAGIC)
    assert b"oldold" not in raw
    on.close()
    off = open_disk(tmp_path, "none", KEY, encrypts=False)
    off.publish("blocks/newest", [b"newest"])
    assert [off.read(f"blocks/{n}", 150_000)[:3] for n in ("old", "new", "newest")] == [
        b"old", b"new", b"new",
    ]  # fmt: skip
    assert (tmp_path / "blocks/newest").read_bytes() == b"newest"
    off.close()
    for key in (OTHER_KEY, None):
        for encrypts in (True, False, None):
            with pytest.raises(FatalError):
                open_disk(tmp_path, "none", key, encrypts=encrypts)


def plain_folder(at, text):
    """Make the folder of a model that was served without the setting, and killed."""
    disk = PosixDisk(at, "none")
    for name in ("model.spec", "blocks/b", "manifests/m.mf", "quarantine/q.why"):
        disk.publish(name, [text * 1_000])
    disk.close()
    (at / "manifests" / ".tmp-0-0").write_bytes(text)


def test_folders_of_other_models_are_encrypted(model, tmp_path, monkeypatch):
    """A folder in use is encrypted once it is free; until then the node reports it."""
    monkeypatch.setattr("node.store.folder_encryption.ENCRYPTION_RETRY_S", 0.05)
    monkeypatch.setattr("node.store.folder_encryption.ENCRYPTION_STEP_BYTES", 1)
    root = tmp_path / "node-a"
    text = CANARY.encode()
    for name in ("a" * 16, "b" * 16):
        plain_folder(root / name, text)
    other = PosixDisk(root / ("b" * 16), "none")
    other.claim()
    with running(tmp_path, model, encrypt_at_rest=True) as sealed:
        wait_until(lambda: text not in read_all_files(root / ("a" * 16)))
        assert "not encrypted yet" in sealed.node.view().degraded
        assert text in read_all_files(root / ("b" * 16))
        other.close()
        wait_until(lambda: sealed.node.health.degraded is None)
        assert text not in read_all_files(root)
    disk = open_disk(root / ("a" * 16), "none", KEY, encrypts=True)
    names = ("model.spec", "blocks/b", "manifests/m.mf", "quarantine/q.why")
    assert [disk.read(name, 1 << 20) for name in names] == [text * 1_000] * 4
    disk.close()


def test_interrupted_encryption_continues_after_restart(model, tmp_path, monkeypatch):
    monkeypatch.setattr("node.store.folder_encryption._PAUSE_S", 3_600.0)
    monkeypatch.setattr("node.store.folder_encryption.ENCRYPTION_STEP_BYTES", 1)
    root, text = tmp_path / "node-a", CANARY.encode()
    plain_folder(root / ("a" * 16), text)
    with running(tmp_path, model, encrypt_at_rest=True) as sealed:
        wait_until(lambda: MAGIC in (root / ("a" * 16) / "model.spec").read_bytes())
        assert sealed.node.health.degraded
    assert text in read_all_files(root)
    monkeypatch.undo()
    with running(tmp_path, model, encrypt_at_rest=True) as sealed:
        wait_until(lambda: text not in read_all_files(root))


def test_disk_is_plain_without_the_setting(tmp_path):
    for encrypts in (False, None):
        disk = open_disk(tmp_path, "none", KEY, encrypts=encrypts)
        assert type(disk) is PosixDisk
        disk.close()
    assert list(tmp_path.iterdir()) == []


def read_all_files(folder) -> bytes:
    found = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):  # replaced meanwhile
            found.append(path.read_bytes())
    return b"".join(found)


def test_node_with_encryption_keeps_answers_and_hides_texts(tmp_path, capsys):
    """Enabled over plain files: evicted, restarted, moved; the same answers, nothing readable."""
    model = str(write_model(tmp_path / "llama", LLAMA))
    messages = [{"role": "user", "content": f"{CANARY} " * 60}]
    folder = tmp_path / "nodes" / "node-a"
    with running(tmp_path / "nodes", model) as plain:
        first = ask(plain, messages, agent="a", max_tokens=4)
        assert CANARY.encode() in read_all_files(folder)
    with running(tmp_path / "nodes", model, encrypt_at_rest=True) as sealed:
        assert CANARY.encode() not in read_all_files(folder)
        warm = ask(sealed, messages, agent="a", max_tokens=4)
        call(sealed, Flush(drop_hot=True), Done)
        again = ask(sealed, messages, agent="a", max_tokens=4)
        other = ask(sealed, messages, agent="b", max_tokens=4)
        assert sealed.node.resources.store.blocks.check_integrity() == []
        assert sealed.node.resources.store.blocks.scrub(1 << 30).damaged == ()
        with running(tmp_path / "elsewhere", model, "node-b") as target:
            copied = migrate(sealed, target, "a", 1)
            moved = ask(target, messages, agent="a", max_tokens=4, epoch=2)
    assert first.text == warm.text == again.text == other.text == moved.text
    caches = [reply.admitted.cache for reply in (warm, again, moved)]
    assert caches == [CacheTier.DISK, CacheTier.DISK, CacheTier.PEER]
    assert copied.blocks_sent > 0
    assert CANARY.encode() not in read_all_files(folder)
    assert [p.name for p in folder.rglob(MARKER)] == [MARKER]
    key_file = tmp_path / CLUSTER_KEY
    key_file.write_text(KEY.hex())
    key_file.chmod(0o600)
    argv = ["--data", str(tmp_path), "--node", "node-a"]
    assert fsck(argv) == 0, capsys.readouterr()
    key_file.write_text(OTHER_KEY.hex())
    assert fsck(argv) == 2
