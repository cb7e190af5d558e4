"""Window layers of edited records: stored beside the blocks of their pieces, and restored."""

import random
from dataclasses import replace

import numpy as np
import pytest

from fabric.errors import CorruptDataError
from fabric.kvcache.arrangement import Move
from fabric.kvcache.cache_spec import CacheGroup, LayerKind, LayerSpec, ModelCacheSpec, SlotSpec
from fabric.record.layout import Layout, layout_of
from fabric.record.manifest import Manifest, Placed, decode_manifest, encode_manifest
from fabric.record.piece_table import PieceTable
from fabric.record.stored_part import named_blocks, restorable, trim_restore_points, truncate_record
from fabric.u32s import U32s
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.tiers.restore import load_layout
from tests.node.store.test_edited_records import random_moves
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, SALT, TENANT, make_manifest

WINDOW = 70
_SLOT = SlotSpec("keys", 1, 4, 0, 1, "F32")
SPEC = ModelCacheSpec(
    (LayerSpec(LayerKind.FULL, (_SLOT,)), LayerSpec(LayerKind.WINDOW, (_SLOT,), (), WINDOW))
)
ROW_BYTES = 16


@pytest.fixture
def store(disk):
    blocks = BlockStore(disk, SPEC, FINGERPRINT)
    return AgentStore(blocks, ManifestStore(disk, CLUSTER_KEY), CLUSTER_KEY, FINGERPRINT, SPEC)


class Memory:
    """Tokens with the row of each; a window row is the full row reversed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.tokens, self.rows = rng, [], []

    def compute(self, count: int) -> None:
        self.tokens += [self.rng.randrange(1 << 16) for _ in range(count)]
        self.rows += [self.rng.randbytes(ROW_BYTES) for _ in range(count)]

    def moved(self, moves: list[Move]) -> "Memory":
        result = Memory(self.rng)
        for move in moves:
            result.compute(move.new_start - len(result.tokens))
            result.tokens += self.tokens[move.start : move.end]
            result.rows += self.rows[move.start : move.end]
        return result


def bytes_of(rows: list[bytes], group: CacheGroup) -> bytes:
    return b"".join(row[::-1] if group is CacheGroup.WINDOW else row for row in rows)


def save(store: AgentStore, memory: Memory, layout: Layout | None, before: Manifest) -> Manifest:
    """Store as a turn does, with the windows of all rows that it computed."""
    ids, windows = memory.tokens, []
    head = store.name_head(TENANT, ids, layout) if layout is not None else None
    lost = head.spans if head is not None else ()
    later_spans = (
        store.spans(TENANT, ids, lineage=head.lineage) if head else store.spans(TENANT, ids)
    )
    refs = []
    for span in (*lost, *later_spans):
        rows = memory.rows[span.start : span.end]
        refs.append(store.save_block(span, ids, memoryview(bytes_of(rows, CacheGroup.FULL))))
        twin = span.in_group(SALT, CacheGroup.WINDOW)
        kv = memoryview(bytes_of(rows, CacheGroup.WINDOW))
        windows.append(Placed(store.save_block(twin, ids, kv), span.end))
    pieces, edited = PieceTable(), None
    if head is not None:
        pieces, edited = head.filled(refs[: len(lost)], U32s(ids))
        windows += [Placed(ref, end) for end, ref in head.windows]
    record = replace(
        before,
        revision=before.revision + 1,
        text="",
        token_ids=U32s(ids),
        token_ends=U32s([0] * len(ids)),
        prompt_tokens_count=0,
        pieces=pieces.append(refs[len(lost) :]),
        windows=tuple(sorted(windows, key=lambda place: place.end)),
        edited=edited,
    )
    assert decode_manifest(encode_manifest(record)) == record
    store.publish(record, before if before.token_ids else None)
    return record


def stored_memory(store: AgentStore, rng: random.Random, count: int) -> tuple[Memory, Manifest]:
    memory = Memory(rng)
    memory.compute(count)
    return memory, save(store, memory, None, make_manifest([], revision=0))


def check_read(store: AgentStore, memory: Memory, layout: Layout) -> ResidentCache:
    """Load the layout; check that every visible row is present and is its token's."""
    cache = ResidentCache(SPEC, len(memory.tokens))
    got = load_layout(store, TENANT, memory.tokens, layout, cache)
    found = got.arrangement
    assert got == layout
    present = [(0, found.tokens_count), *found.ahead]
    for start, end in present:
        rows = np.ascontiguousarray(cache.rows()[0][:, start:end])
        assert bytes(rows) == bytes_of(memory.rows[start:end], CacheGroup.FULL)
    count = found.tokens_count
    begins = cache.rows(CacheGroup.WINDOW)[0][:, : count - cache.window_base]
    checked = [(cache.window_base, count, begins)]
    checked += [(rows.start, rows.end, rows.views()[0]) for rows in cache.windows.beside]
    assert len(checked) == len(present)
    for (start, end, rows), (present_start, present_end) in zip(checked, present, strict=True):
        assert start <= max(present_start, end - WINDOW + 1) <= end == present_end
        wanted = bytes_of(memory.rows[start:end], CacheGroup.WINDOW)
        assert bytes(np.ascontiguousarray(rows)) == wanted
    return cache


@pytest.mark.parametrize("seed", range(12))
def test_windows_are_restored_before_each_hole_and_the_end(store, seed):
    """Edited again and again: while it is edited, and once it is stored."""
    rng = random.Random(seed)
    memory, record = stored_memory(store, rng, rng.randint(20, 900))
    for _ in range(rng.randint(1, 3)):
        moves = random_moves(rng, len(memory.tokens))
        layout, memory = store.layout(record).moved(moves), memory.moved(moves)
        check_read(store, memory, layout)
        memory.compute(rng.choice([1, 40, 300]))
        record = save(store, memory, layout, record)
        check_read(store, memory, store.layout(record))
        named = named_blocks(record, SALT)
        assert [ref for ref, _ in named] == record.refs
        assert all(span.names(ref) for ref, span in named)
        least = trim_restore_points(record, WINDOW)
        least.check()
        check_read(store, memory, store.layout(least))
        assert len(least.windows) <= len(record.windows)


@pytest.mark.parametrize("seed", range(8))
def test_lost_windows_shorten_the_restorable_prefix(store, seed):
    """Windows lost on the drive, or never listed in the record, restore no wrong rows."""
    rng = random.Random(seed)
    memory, record = stored_memory(store, rng, 900)
    moves = random_moves(rng, 900)
    layout, memory = store.layout(record).moved(moves), memory.moved(moves)
    lost = {place.block for place in record.windows if rng.random() < 0.4}
    fewer = restorable(layout.with_lost_blocks(lost), WINDOW)
    if fewer.tokens_count:
        check_read(store, memory, fewer)
    for ref in lost:
        store.blocks._quarantine(ref, "test")
    cache = ResidentCache(SPEC, len(memory.tokens))
    got = load_layout(store, TENANT, memory.tokens, layout, cache)
    assert got.arrangement == fewer.arrangement
    memory.compute(10)
    record = save(store, memory, layout.with_lost_blocks(lost), record)
    cut = truncate_record(record, {rng.choice(record.refs)})
    cut.check()
    if cut.tokens_count:
        named = named_blocks(cut, SALT)
        assert [ref for ref, _ in named] == cut.refs
        assert all(span.names(ref) for ref, span in named)
        assert layout_of(cut, named).tokens_count == cut.tokens_count


def test_windows_not_ending_at_a_piece_are_refused(store):
    memory, record = stored_memory(store, random.Random(1), 600)
    moves = [Move(0, 100, 0), Move(200, 600, 130)]
    layout, memory = store.layout(record).moved(moves), memory.moved(moves)
    record = save(store, memory, layout, record)
    first, *others = record.windows
    wrong = (Placed(first.block, first.end - 1), *others)
    with pytest.raises(CorruptDataError, match="a block does not start at a block boundary"):
        replace(record, windows=wrong).check()
