"""A restored edited cache has its original rows, at their new positions."""

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fabric.kvcache.arrangement import Move
from fabric.kvcache.block_chain import UNEDITED
from fabric.limits import BLOCK_TOKENS, MIB
from fabric.record.layout import Held, Layout
from fabric.record.manifest import Manifest, decode_manifest, encode_manifest
from fabric.record.piece_table import PieceTable
from fabric.record.stored_part import named_blocks, truncate_before_edits, truncate_record
from fabric.u32s import U32s
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.block_files import file_name
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.tiers.restore import load_layout
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, SALT, SPEC, TENANT, make_manifest

SEEDS = range(25)


@pytest.fixture
def store(disk):
    blocks = BlockStore(disk, SPEC, FINGERPRINT)
    return AgentStore(blocks, ManifestStore(disk, CLUSTER_KEY), CLUSTER_KEY, FINGERPRINT, SPEC)


@dataclass
class Memory:
    """An agent's cache by hand: each token with its row, and how far that is from its place."""

    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)

    def compute(self, count: int) -> None:
        for _ in range(count):
            self.tokens.append(self.rng.randrange(1 << 16))
            self.rows.append(self.rng.randbytes(SPEC.bytes_per_token))
            self.deltas.append(0)

    def moved(self, moves: list[Move]) -> "Memory":
        result = Memory(self.rng)
        for move in moves:
            result.compute(move.new_start - len(result.tokens))
            by = move.new_start - move.start
            result.tokens += self.tokens[move.start : move.end]
            result.rows += self.rows[move.start : move.end]
            result.deltas += [delta + by for delta in self.deltas[move.start : move.end]]
        return result

    def kv(self, start: int, end: int) -> memoryview:
        """Return tokens in the order of a block file: array by array."""
        widths = [row.shape[2] * row.shape[0] for row in ResidentCache(SPEC, 1).rows()]
        out, at = bytearray(), 0
        for width in widths:
            for row in self.rows[start:end]:
                out += row[at : at + width]
            at += width
        return memoryview(out)


def rows_of(cache: ResidentCache, start: int, end: int) -> bytes:
    return b"".join(bytes(np.ascontiguousarray(row[:, start:end])) for row in cache.rows())


def random_moves(rng: random.Random, count: int) -> list[Move]:
    """Remove and insert spans, at most four times."""
    cuts = sorted(rng.sample(range(1, count), k=min(count - 1, 2 * rng.randint(1, 4))))
    moves, old, new = [], 0, 0
    for start, end in zip(cuts[::2], cuts[1::2], strict=False):
        moves.append(Move(old, start, new))
        new += start - old + rng.choice([0, 0, 1, 9, BLOCK_TOKENS, 300])
        old = end
    return [*moves, Move(old, count, new)]


def save(store: AgentStore, memory: Memory, layout: Layout | None, before: Manifest) -> Manifest:
    """Store as a turn does: the holes, the rows after the head, and then the record."""
    ids = memory.tokens
    head = store.name_head(TENANT, ids, layout) if layout is not None else None
    lineage = head.lineage if head is not None else UNEDITED
    spans = [*(head.spans if head is not None else ())]
    later_spans = store.spans(TENANT, ids, lineage=lineage)
    refs = [store.save_block(s, ids, memory.kv(s.start, s.end)) for s in (*spans, *later_spans)]
    pieces, edited_memory = PieceTable(), None
    if head is not None:
        pieces, edited_memory = head.filled(refs[: len(spans)], U32s(ids))
    record = replace(
        before,
        revision=before.revision + 1,
        text="",
        token_ids=U32s(ids),
        token_ends=U32s([0] * len(ids)),
        prompt_tokens_count=0,
        pieces=pieces.append(refs[len(spans) :]),
        edited=edited_memory,
    )
    assert decode_manifest(encode_manifest(record)) == record
    store.publish(record, before if before.token_ids else None)
    return record


def stored_memory(store: AgentStore, rng: random.Random, count: int) -> tuple[Memory, Manifest]:
    """Compute `count` tokens and store them."""
    memory = Memory(rng)
    memory.compute(count)
    return memory, save(store, memory, None, make_manifest([], revision=0))


def edited_memory(
    store: AgentStore, rng: random.Random, count_after: int = 300
) -> tuple[Memory, Manifest]:
    """Edit a stored memory, compute `count_after` tokens after it, and store it."""
    memory, record = stored_memory(store, rng, rng.randint(300, 900))
    moves = random_moves(rng, len(memory.tokens))
    layout, memory = store.layout(record).moved(moves), memory.moved(moves)
    memory.compute(count_after)
    return memory, save(store, memory, layout, record)


def check_restored(store: AgentStore, memory: Memory, record: Manifest) -> None:
    layout = store.layout(record)
    cache = ResidentCache(SPEC, len(memory.tokens))
    assert load_layout(store, TENANT, memory.tokens, layout, cache) == layout
    assert rows_of(cache, 0, len(memory.tokens)) == bytes(memory.kv(0, len(memory.tokens)))
    found = layout.arrangement
    assert (found.tokens_count, found.ahead) == (len(memory.tokens), ())
    deltas = [0] * len(memory.tokens)
    for shift in found.shifts:
        deltas[shift.start : shift.end] = [shift.delta] * (shift.end - shift.start)
    assert deltas == memory.deltas


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_restored_at_their_edited_positions(store, seed):
    """Edited again and again, with turns between, and each time from a new process."""
    rng = random.Random(seed)
    memory, record = stored_memory(store, rng, rng.randint(20, 900))
    for _ in range(rng.randint(1, 4)):
        moves = random_moves(rng, len(memory.tokens))
        layout = store.layout(record).moved(moves)
        assert layout.exact_tokens <= moves[0].end
        memory = memory.moved(moves)
        memory.compute(rng.choice([1, 40, 300]))
        record = save(store, memory, layout, record)
        check_restored(store, memory, record)
        memory.compute(rng.choice([1, 300]))  # a turn that edits nothing
        grown = save(store, memory, store.layout(record), record)
        head = len(record.edited.origins)
        assert grown.pieces.items[:head] == record.pieces.items[:head]
        record = grown
        check_restored(store, memory, record)


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_and_their_inverses_restore_the_layout(store, seed):
    """A hundred times: nothing is lost on the way, and no pieces pile up."""
    rng = random.Random(seed)
    _, record = stored_memory(store, rng, 900)
    layout = start = store.layout(record)
    for _ in range(100):
        at, by = rng.randint(1, 899), rng.randint(1, 400)
        layout = layout.moved([Move(0, at, 0), Move(at, 900, at + by)])
        layout = layout.moved([Move(0, at, 0), Move(at + by, 900 + by, at)])
    assert layout.parts == start.parts
    assert not layout.arrangement.shifts


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_block_ends_the_restored_prefix(store, disk, seed):
    """Rows after it, moved or not, are not restored."""
    rng = random.Random(seed)
    _, record = stored_memory(store, rng, 900)
    layout = store.layout(record).moved(random_moves(rng, 900))
    starts = [(s, p.piece.block) for s, _, p in layout.placed() if isinstance(p, Held)]
    at, ref = rng.choice(starts)
    raw = bytearray(disk.read(file_name(ref), MIB))
    raw[-5] ^= 1
    disk.publish(file_name(ref), [memoryview(raw)])
    ids = fitting_prompt(layout)
    cache = ResidentCache(SPEC, len(ids))
    found = load_layout(store, TENANT, ids, layout, cache)
    first = min(s for s, block in starts if block == ref)
    assert found.tokens_count <= first <= at
    assert found == layout.cut(first).without_open_end()


def fitting_prompt(layout: Layout) -> list[int]:
    """Return a prompt that fits the layout, with arbitrary tokens in holes."""
    ids: list[int] = []
    for _, _, part in layout.placed():
        if isinstance(part, Held):
            ids += part.origin.tokens[part.piece.start : part.piece.end]
        else:
            ids += [7] * part.tokens_count
    return ids


@pytest.mark.parametrize("seed", SEEDS)
def test_mismatched_tokens_are_a_miss(store, seed):
    """A record with wrong tokens restores nothing from the first wrong one on."""
    rng = random.Random(seed)
    _, record = stored_memory(store, rng, 700)
    layout = store.layout(record).moved(random_moves(rng, 700))
    ids = fitting_prompt(layout)
    held = [i for s, e, p in layout.placed() if isinstance(p, Held) for i in range(s, e)]
    wrong = rng.choice(held)
    ids[wrong] ^= 1
    found = load_layout(store, TENANT, ids, layout, ResidentCache(SPEC, len(ids)))
    assert found.tokens_count <= wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_block_names_of_an_edited_record_follow_from_tokens(store, seed):
    """A node that receives the record can verify every name."""
    rng = random.Random(seed)
    _, record = edited_memory(store, rng)
    named = named_blocks(record, SALT)
    assert [ref for ref, _ in named] == record.refs
    assert all(span.names(ref) for ref, span in named)
    assert [ref.tokens_count for ref, _ in named] == [
        len(span.tokens_in(record.token_ids)) for _, span in named
    ]
    other = named_blocks(record, b"s" * 32)
    assert not any(span.names(ref) for ref, span in other)


@pytest.mark.parametrize("seed", SEEDS)
def test_record_with_a_lost_block_is_truncated(store, seed):
    """The record is cut at the block's place, within the head or after it."""
    rng = random.Random(seed)
    _, record = edited_memory(store, rng)
    cut = truncate_record(record, {rng.choice(record.refs)})
    cut.check()
    assert cut.tokens_count < record.tokens_count
    if cut.tokens_count:
        named = named_blocks(cut, SALT)
        assert [ref for ref, _ in named] == cut.refs
        assert all(span.names(ref) for ref, span in named)


@pytest.mark.parametrize("seed", SEEDS)
def test_record_stripped_of_edits_has_whole_blocks_only(store, seed):
    """A partial block would need the edited head to name it."""
    _, record = edited_memory(store, random.Random(seed))
    kept = truncate_before_edits(record)
    kept.check()
    assert kept.edited is None
    assert not kept.pieces.is_edited
    assert kept.tokens_count <= record.edited.exact_tokens
    assert all(span.names(ref) for ref, span in named_blocks(kept, SALT))


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_blocks_are_stored_again_from_memory(store, seed):
    """Whole blocks are stored unchanged, partial ones with their remaining rows."""
    rng = random.Random(seed)
    memory, record = edited_memory(store, rng, rng.choice([1, 300]))
    lost = {ref for ref in record.refs if rng.random() < 0.4}
    for ref in lost:
        store.blocks._quarantine(ref, "test")
    known = store.layout(record).with_lost_blocks(lost)
    again = save(store, memory, known, record)
    assert not store.missing(again)
    again.check()
    check_restored(store, memory, again)
    assert again.edited.exact_tokens == record.edited.exact_tokens
