"""Branches of an agent: what is kept of superseded forms of its conversation.

    before   [ clock 1 )[ question, answer, … )
    record   [ clock 2 )[ question, answer, …, next question and answer )
    branch   the blocks of `before` that `record` lacks

Clients rewrite a clock, a reminder or an old result, and sometimes take that back. A branch has no
text: a prompt finds its blocks by its own tokens, as it finds those of other conversations. So only
whole, unedited blocks are kept, and they are the first to go when room is short.
"""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from fabric.kvcache.block_chain import BlockRef
from fabric.limits import BLOCK_TOKENS, BRANCHES_MAX
from fabric.record.manifest import Branch, Manifest

Branches = tuple[Branch, ...] | None


def branches_after(
    previous: Manifest | None,
    record: Manifest,
    missing: Callable[[Iterable[BlockRef]], Sequence[BlockRef]],
    *,
    is_superseded: bool,
) -> Branches:
    """Return the branches of a record that replaces `previous`, which it may have superseded.

    `missing` returns the blocks that are not stored. An agent with directives keeps no branch,
    since that may have what they drop.
    """
    if previous is None or record.directives:
        return None
    branches = list(previous.branches or ())
    if is_superseded and (found := _shareable_blocks(previous)):
        branches.append(Branch(tuple(found), previous.tokens_count))
    if not branches:
        return None
    refs = [ref for branch in branches for ref in branch.refs]
    dropped_refs = {*record.refs}.intersection(refs)
    dropped_refs.update(missing(refs))
    return without_refs(tuple(branches), dropped_refs, most=BRANCHES_MAX)


def without_refs(
    branches: Branches, gone: AbstractSet[BlockRef], most: int = BRANCHES_MAX
) -> Branches:
    """Return the newest branches without some blocks; None if nothing is left."""
    if not branches:
        return None
    remaining = (
        replace(branch, refs=tuple(ref for ref in branch.refs if ref not in gone))
        for branch in branches
    )
    return tuple(branch for branch in remaining if branch.refs)[-most:] or None


def _shareable_blocks(record: Manifest) -> list[BlockRef]:
    """List the blocks of a record that other prompts with its tokens find."""
    if record.edited is not None:
        return []
    blocks = [piece.block for piece in record.pieces if piece.tokens_count == BLOCK_TOKENS]
    places = (*record.windows, *record.states)
    return blocks + [place.block for place in places if place.end % BLOCK_TOKENS == 0]
