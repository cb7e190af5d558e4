import os

import pytest

from fabric.errors import CorruptDataError
from fabric.ids import BlockHash, Fingerprint
from fabric.kvcache.block_file import render_block_header
from fabric.kvcache.hashing import ROOT_PARENT
from node.store.block_store import BlockMissingError, BlockStore
from node.store.posix_disk import DiskError
from tests.support.blocks import FINGERPRINT, SPEC, make_block, make_spec, with_kv


def reopened(disk, spec=SPEC, fingerprint=FINGERPRINT) -> BlockStore:
    store = BlockStore(disk, spec, fingerprint)
    store.recover()
    return store


def variant(block):
    """Return the same tokens computed elsewhere, with other rounding."""
    return with_kv(block.tokens, bytes(reversed(block.kv)), parent=block.parent)


def test_stored_block_is_loaded(store):
    block = make_block(1, 17)
    assert store.find(block.ref.block_hash) is None

    assert block.put_into(store) == block.ref
    assert store.has(block.ref)
    assert store.find(block.ref.block_hash) == block.ref
    assert block.load_from(store) == block.kv
    assert store.check_integrity() == []


@pytest.mark.parametrize("tokens_count", [1, 2, 255, 256])
def test_large_blocks_are_loaded_in_groups(disk, tokens_count):
    spec = make_spec(layers=3, heads=8, width=128, dtype="BF16")
    store = BlockStore(disk, spec, FINGERPRINT)
    block = make_block(5, tokens_count, spec)
    block.put_into(store)
    resident = bytearray(len(block.kv))
    view, runs, at = memoryview(resident), [], 0
    for tensor in spec.tensors(tokens_count):
        run = tensor.size_bytes // 8
        runs += [view[at + head * run : at + (head + 1) * run] for head in range(8)]
        at += tensor.size_bytes

    store.load_into(block.ref, block.parent, block.tokens, runs)

    assert resident == block.kv


def test_block_file_is_header_and_payload(store, disk):
    block = make_block(1)
    block.put_into(store)
    header = render_block_header(SPEC, FINGERPRINT, block.parent, block.ref.block_hash, 2)
    assert disk.read(f"blocks/{block.ref.name}.full", 1 << 20) == header + block.payload
    assert store.total_bytes == len(header) + block.ref.payload_bytes


def test_payload_may_be_passed_in_any_parts(store):
    block = make_block(1, 9)
    view = memoryview(block.kv)
    parts = [view[:1], view[1:1], view[1:100], view[100:]]
    assert store.put(block.parent, block.ref.block_hash, block.tokens, parts) == block.ref


def test_repeated_put_writes_the_block_once(store, disk, monkeypatch):
    published = []
    publish = disk.publish_ordered

    def count(name, parts):
        published.append(publish(name, parts))

    monkeypatch.setattr(disk, "publish_ordered", count)
    block = make_block(1)
    block.put_into(store)
    block.put_into(store)
    block.adopt_into(store)
    assert len(published) == 1


def test_variants_of_one_hash_coexist(store):
    one = make_block(1)
    other = variant(one)
    for block in (one, other):
        block.put_into(store)
    assert one.ref.block_hash == other.ref.block_hash
    assert one.load_from(store) == one.kv
    assert other.load_from(store) == other.kv
    store.abandon([one.ref])
    assert store.sweep().blocks_count == 1
    assert store.find(one.ref.block_hash) == other.ref


def test_recover_finds_stored_blocks(store, disk):
    blocks = [make_block(seed, count) for seed, count in enumerate((1, 2, 100, 256))]
    for block in blocks:
        block.put_into(store)
    again = reopened(disk)
    assert [again.has(block.ref) for block in blocks] == [True] * 4
    assert again.total_bytes == store.total_bytes
    assert [block.load_from(again) for block in blocks] == [block.kv for block in blocks]
    assert again.check_integrity() == []


def test_recover_removes_invalid_block_files(store, disk, tmp_path):
    block = make_block(1)
    block.put_into(store)
    raw = disk.read(f"blocks/{block.ref.name}.full", 1 << 20)
    name = "ab" * 32 + "-" + "cd" * 16
    disk.publish(f"blocks/{name}.full", [raw + b"x"])
    disk.publish(f"blocks/{name[1:]}.full", [raw])
    disk.publish(f"blocks/{name}.old", [raw])
    disk.publish("blocks/readme", [b""])
    (disk.root / "blocks" / f"{name[:-2]}aa.full").symlink_to(tmp_path)

    again = BlockStore(disk, SPEC, FINGERPRINT)
    assert len(again.check_integrity()) == 6
    assert again.recover() == 5
    assert again.check_integrity() == []
    assert disk.list_names("blocks") == [f"{block.ref.name}.full"]
    assert tmp_path.exists()


def test_blocks_of_another_model_are_never_loaded(store, disk):
    block = make_block(1)
    block.put_into(store)

    same_shape = reopened(disk, fingerprint=Fingerprint(b"g" * 32))
    assert same_shape.has(block.ref)
    with pytest.raises(CorruptDataError):
        block.load_from(same_shape)
    assert not same_shape.has(block.ref)

    block.put_into(reopened(disk))
    other_shape = BlockStore(disk, make_spec(dtype="F32"), FINGERPRINT)
    assert other_shape.recover() == 1


def test_missing_block_is_a_miss(store, disk):
    block = make_block(1)
    with pytest.raises(BlockMissingError):
        block.load_from(store)
    block.put_into(store)
    os.unlink(disk.root / "blocks" / f"{block.ref.name}.full")  # noqa: PTH108
    for call in (block.load_from, lambda store: store.open_payload(block.ref)):
        with pytest.raises(BlockMissingError):
            call(store)
        assert not store.has(block.ref)
    assert disk.list_names("quarantine") == []
    block.put_into(store)
    assert block.load_from(store) == block.kv


def test_load_with_wrong_parent_or_tokens_is_refused(store, disk):
    block = make_block(1)
    for parent, tokens in (
        (BlockHash(b"q" * 32), block.tokens),
        (block.parent, (block.tokens[0], 0)),
    ):
        block.put_into(store)
        with pytest.raises(CorruptDataError):
            store.load_into(block.ref, parent, tokens, [memoryview(bytearray(len(block.kv)))])
        assert not store.has(block.ref)
    assert len(disk.list_names("quarantine")) == 2


def test_mismatched_token_count_touches_no_file(store):
    block = make_block(1)
    block.put_into(store)
    buffers = [memoryview(bytearray(len(block.kv)))]
    for tokens in ((), (1,), (1, 2, 3), tuple(range(300))):
        with pytest.raises(CorruptDataError, match="does not fit"):
            store.load_into(block.ref, block.parent, tokens, buffers)
    assert store.has(block.ref)


def test_wrong_buffer_size_is_an_assertion_error(store):
    block = make_block(1)
    block.put_into(store)
    with pytest.raises(AssertionError):
        store.load_into(block.ref, block.parent, block.tokens, [memoryview(bytearray(3))])
    with pytest.raises(AssertionError):
        store.put(block.parent, block.ref.block_hash, block.tokens, [memoryview(b"short")])
    assert store.has(block.ref)


def test_read_failing_for_lack_of_descriptors_keeps_the_block(store, disk, monkeypatch):
    block = make_block(1)
    block.put_into(store)

    def refuse(*_args):
        message = "cannot read: Too many open files"
        raise DiskError(message, 24)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "opened", refuse)
        with pytest.raises(BlockMissingError):
            block.load_from(store)
    assert block.load_from(store) == block.kv


def test_adopt_accepts_only_the_exact_block(store):
    block = make_block(1, 7)
    ref, parent, tokens, payload = block.ref, block.parent, block.tokens, block.payload
    for bad in (payload[:-1], payload + b"x", b"", payload[:-1] + b"\xff", b"\xff" + payload[1:]):
        with pytest.raises(CorruptDataError):
            store.adopt(ref, parent, tokens, memoryview(bad))
    for bad_tokens in (tokens[::-1], tokens[:-1], (), tuple(range(257))):
        with pytest.raises(CorruptDataError):
            store.adopt(ref, parent, bad_tokens, memoryview(payload))
    assert store.find(ref.block_hash) is None
    assert store.check_integrity() == []

    block.adopt_into(store)
    assert block.load_from(store) == block.kv


def test_opened_payload_stays_readable_after_a_sweep(store):
    block = make_block(1, 40)
    block.put_into(store)
    lent = store.open_payload(block.ref)
    store.abandon([block.ref])
    store.sweep()
    view = memoryview(bytearray(lent.length))
    lent.read_into(view, 0)
    lent.close()
    assert view == block.payload
    with pytest.raises(BlockMissingError):
        store.open_payload(block.ref)


def test_scrub_covers_all_blocks_and_finds_damage(store, disk):
    blocks = [make_block(seed) for seed in range(6)]
    for block in blocks:
        block.put_into(store)
    bad = blocks[3]
    path = disk.root / "blocks" / f"{bad.ref.name}.full"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)

    one = store.total_bytes // 6
    reports = [store.scrub(2 * one) for _ in range(3)]

    assert [report.blocks_count for report in reports] == [2, 2, 2]
    assert sum((report.damaged for report in reports), ()) == (bad.ref,)
    assert store.scrub(100 * one).blocks_count == 5
    assert store.scrub(1).blocks_count == 1
    assert store.check_integrity() == []
    store.abandon([block.ref for block in blocks])
    store.sweep()
    assert store.scrub(1 << 40).blocks_count == 0


@pytest.mark.parametrize("damage", ["header", "length", "gone"])
def test_scrub_detects_every_kind_of_damage(store, disk, damage):
    block = make_block(1)
    block.put_into(store)
    path = disk.root / "blocks" / f"{block.ref.name}.full"
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(raw if damage == "header" else raw + b"x")
    assert store.scrub(1).damaged == (() if damage == "gone" else (block.ref,))
    assert not store.has(block.ref)


def test_check_integrity_reports_inconsistencies(store, disk):
    block = make_block(1)
    block.put_into(store)
    path = disk.root / "blocks" / f"{block.ref.name}.full"
    path.rename(disk.root / "elsewhere")
    assert store.check_integrity() == [f"{block.ref.name} is indexed but not stored"]
    (disk.root / "elsewhere").rename(path)
    store._index._total_bytes += 1
    store._index._busy.add(block.ref)
    assert store.check_integrity() == ["total bytes are not the sum", "a block is still busy"]


def test_block_restored_during_a_miss_stays_indexed(store, disk, monkeypatch):
    block = make_block(1)
    block.put_into(store)
    sizes = iter([FileNotFoundError()])
    opened = disk.opened

    def miss_once(name):
        for error in sizes:
            raise error
        return opened(name)

    monkeypatch.setattr(disk, "opened", miss_once)
    with pytest.raises(BlockMissingError):
        block.load_from(store)
    assert store.has(block.ref)


def test_blocks_with_different_parents_are_distinct(store):
    root = make_block(1)
    child = with_kv(root.tokens, root.kv, parent=root.ref.block_hash)
    root.put_into(store)
    child.put_into(store)
    assert root.ref.block_hash != child.ref.block_hash
    assert root.ref.checksum == child.ref.checksum
    assert root.parent == ROOT_PARENT
    assert child.load_from(store) == root.kv
