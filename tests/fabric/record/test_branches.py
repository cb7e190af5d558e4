"""Branches: the kept and the dropped blocks of a superseded form."""

from dataclasses import replace

import pytest

from fabric.errors import CorruptDataError
from fabric.limits import BLOCK_TOKENS, BRANCHES_MAX
from fabric.record.branches import branches_after
from fabric.record.manifest import Branch, decode_manifest, encode_manifest
from fabric.record.rekey import portable_record
from fabric.record.stored_part import truncate_record
from tests.support.blocks import make_block, make_manifest

BLOCKS = [make_block(number, BLOCK_TOKENS) for number in range(8)]
REFS = [block.ref for block in BLOCKS]
TAIL = make_block(90, 7)


def record(*blocks, branches=None):
    return replace(make_manifest(list(blocks)), branches=branches)


def branches_if_superseded(previous, after, missing=()):
    return branches_after(
        previous, after, lambda refs: [ref for ref in refs if ref in missing], is_superseded=True
    )


def test_branch_keeps_whole_blocks_absent_from_the_new_form():
    before, after = record(*BLOCKS[:4], TAIL), record(BLOCKS[0], *BLOCKS[5:7])
    branches = branches_if_superseded(before, after)
    assert branches == (Branch(tuple(REFS[1:4]), before.tokens_count),)
    assert {*replace(after, branches=branches).kept_refs} == {*REFS[:4], *REFS[5:7]}


def test_turn_in_same_form_keeps_existing_branches():
    branch = Branch((REFS[7],), 512)
    before = record(BLOCKS[0], branches=(branch,))
    keeps = branches_after(before, record(*BLOCKS[:2]), lambda _: [], is_superseded=False)
    assert keeps == (branch,)
    assert branches_after(None, before, lambda _: [], is_superseded=True) is None


def test_restored_form_is_removed_from_branches():
    before = record(BLOCKS[0], BLOCKS[2], branches=(Branch((REFS[1],), 512),))
    back = branches_if_superseded(before, record(*BLOCKS[:2]))
    assert back == (Branch((REFS[2],), before.tokens_count),)


def test_branches_omit_lost_blocks_and_drop_the_oldest():
    before = record(BLOCKS[0], branches=(Branch((REFS[1], REFS[2]), 768),))
    (branch, _) = branches_if_superseded(before, record(BLOCKS[3]), missing=[REFS[2]])
    assert branch.refs == (REFS[1],)
    many = tuple(Branch((make_block(20 + n, BLOCK_TOKENS).ref,), 256) for n in range(BRANCHES_MAX))
    kept = branches_if_superseded(record(BLOCKS[0], branches=many), record(BLOCKS[3]))
    assert kept == (*many[1:], Branch((REFS[0],), 256))


def test_agent_with_directives_keeps_no_branches():
    before = record(*BLOCKS[:2], branches=(Branch((REFS[5],), 512),))
    assert (
        branches_if_superseded(before, replace(record(BLOCKS[3]), directives=(object(),))) is None
    )


def test_branches_persist_but_do_not_migrate():
    kept = record(BLOCKS[0], branches=(Branch((REFS[5],), 512),))
    assert decode_manifest(encode_manifest(kept)) == kept
    assert portable_record(kept, 0).branches is None
    assert kept.as_replica(kept.owner, 9).branches is None
    assert truncate_record(kept, {REFS[5]}).branches is None
    assert truncate_record(kept, {REFS[0]}).branches == kept.branches


@pytest.mark.parametrize(
    "branches",
    [
        tuple(Branch((REFS[1],), 256) for _ in range(BRANCHES_MAX + 1)),
        (Branch((REFS[1],), 0),),
        (Branch((replace(REFS[1], tokens_count=BLOCK_TOKENS + 1),), 256),),
    ],
)
def test_invalid_branches_are_rejected(branches):
    with pytest.raises(CorruptDataError):
        encode_manifest(record(BLOCKS[0], branches=branches))
