"""Records of edited caches as fuzz inputs, and every use of an accepted one."""

import random
from collections.abc import Sequence
from dataclasses import replace

import msgpack

from fabric.edit_mode import EditMode
from fabric.ids import BlockHash, OperationId
from fabric.kvcache.arrangement import Move
from fabric.kvcache.block_chain import block_spans
from fabric.kvcache.hashing import token_bytes
from fabric.record.directive import Directive
from fabric.record.edited_head import EditNote, dropped_digest
from fabric.record.layout import layout_of, named_head
from fabric.record.manifest import Manifest
from fabric.record.stored_part import named_blocks
from fabric.u32s import U32s
from tests.fuzz.mutation import mutate_tree, spell_msgpack
from tests.support.blocks import FINGERPRINT, MIXED, SALT, Block, make_block, make_manifest, with_kv

DIRECTIVES = (
    Directive(OperationId("tidy-up-1"), EditMode.AMORTIZE, "[cleared]", result_of="call_17"),
    Directive(
        OperationId("tidy-up-2"), EditMode.FORGET, None, message_digest=b"s" * 16, made_s=7.5
    ),
)


def edited_record() -> tuple[Manifest, list[Block]]:
    """Return a record edited once, within its second block, and its blocks."""
    first = make_block(1, 256, MIXED)
    second = make_block(2, 256, MIXED, first.ref.block_hash)
    tail = make_block(3, 40, MIXED, second.ref.block_hash)
    before = make_manifest([first, second, tail])
    ids = list(before.token_ids)
    moves = (Move(0, 300, 0), Move(340, 552, 310))
    digest = dropped_digest(SALT, token_bytes(ids[300:340]))
    note = EditNote(1.5, 300, 40, 10, 212, digest)
    layout = layout_of(before, named_blocks(before, SALT)).moved(moves, (note,))
    edited_ids = [*ids[:300], *range(10), *ids[340:], *range(100, 107)]
    named = named_head(layout, SALT, FINGERPRINT, edited_ids)
    stored = [_stored(span.parent, edited_ids[span.start : span.end]) for span in named.spans]
    pieces, head = named.filled([block.ref for block in stored], U32s(edited_ids))
    record = replace(  # its head
        before,
        text="x" * len(edited_ids),
        token_ids=U32s(edited_ids),
        token_ends=U32s(range(1, len(edited_ids) + 1)),
        prompt_tokens_count=len(edited_ids),
        pieces=pieces,
        edited=head,
    )
    spans = block_spans(SALT, FINGERPRINT, edited_ids, lineage=named.lineage)
    behind = [_stored(span.parent, edited_ids[span.start : span.end]) for span in spans]
    record = replace(record, pieces=pieces.append(block.ref for block in behind))
    blocks = {block.ref: block for block in (first, second, tail, *stored, *behind)}
    return record, [blocks[ref] for ref in dict.fromkeys(record.refs)]


def _stored(parent: BlockHash, ids: Sequence[int]) -> Block:
    tokens = tuple(ids)
    return with_kv(tokens, bytes(MIXED.kv_bytes(len(tokens))), MIXED, parent)


def rebuilt_edits(rng: random.Random, body: bytes) -> bytes:
    """Change only a record's edits."""
    tree = msgpack.unpackb(body)
    name = rng.choice(
        [name for name in ("edited", "directives", "pieces", "windows", "states") if tree.get(name)]
        or ["pieces"]
    )
    if rng.random() < 0.1:
        ref = tree["pieces"][0]["block"] if tree["pieces"] else {}
        window = {"block": {**ref, "group": "window"}, "end": rng.choice((1, 256, 300, 529))}
        return spell_msgpack(rng, {**tree, "windows": [window]})
    return spell_msgpack(rng, {**tree, name: mutate_tree(rng, tree[name])})


def use(record: Manifest) -> None:
    """Use a record's memory as a node does: lay it out, cut it, edit it, name its blocks."""
    named = named_blocks(record, SALT)
    if len(named) < len(record.refs) or not all(span.names(ref) for ref, span in named):
        return  # `AgentStore.layout` refuses it, too
    layout = layout_of(record, named)
    count = layout.tokens_count
    assert count <= record.tokens_count
    arrangement = layout.arrangement
    assert arrangement.end <= count
    assert layout.cut(count // 2).tokens_count == count // 2
    if count > 8:
        third = count // 3
        moves = (Move(0, third, 0), Move(count - third, count, third + 5))
        edited = layout.moved(moves)
        ids = [*record.token_ids[:third], *range(5), *record.token_ids[count - third : count]]
        head = named_head(edited.with_lost_blocks({*layout.refs[::2]}), SALT, FINGERPRINT, ids)
        assert sum(part.tokens_count for part in edited.parts) == len(ids)
        assert all(span.end - span.start for span in head.spans)
