"""Cut a token sequence into blocks and name each by everything up to its end.

What was computed behind an edit is not what its tokens alone would give, since it has seen what the
edit took away. So its names follow from the edits, too: neither is ever found for the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from fabric.ids import BlockHash, Fingerprint
from fabric.kvcache.block import BlockRef
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import ROOT_PARENT, block_hash, edited_parent, group_hash
from fabric.limits import AGENT_TOKENS_MAX, BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EditLineage:
    """Edits of a cache: the first token computed behind them, and a digest of what they did."""

    start: int
    digest: bytes

    def at(self, end: int) -> bytes:
        """Return what the name of a block that ends at token `end` has of it: nothing, or all."""
        return self.digest if end > self.start else b""


UNEDITED: Final = EditLineage(AGENT_TOKENS_MAX, b"")


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Tokens `start:end` of a sequence as the block `block_hash` behind `parent`."""

    start: int
    end: int
    parent: BlockHash
    block_hash: BlockHash
    group: CacheGroup = CacheGroup.FULL
    lineage: bytes = b""

    def in_group(self, salt: bytes, group: CacheGroup) -> "BlockSpan":
        """Return the block of another group of layers for the same tokens."""
        name = group_hash(salt, self.block_hash, group)
        return replace(self, block_hash=name, group=group)

    @property
    def is_full(self) -> bool:
        """Say whether the block holds 256 tokens and may be shared as a prefix."""
        return self.end - self.start == BLOCK_TOKENS

    def names(self, ref: BlockRef) -> bool:
        """Say whether it is what a stored block is called."""
        return (ref.block_hash, ref.group) == (self.block_hash, self.group)


def block_spans(
    salt: bytes,
    fingerprint: Fingerprint,
    tokens: Sequence[int],
    known: Sequence[BlockSpan] = (),
    same_tokens: int = 0,
    lineage: EditLineage = UNEDITED,
) -> tuple[BlockSpan, ...]:
    """List the blocks of `tokens` in order; the last one may be partial (the tail).

    `known` are the blocks of a sequence that begins with the same `same_tokens` tokens: those
    within them are not hashed again, unless they were computed behind other edits.
    """
    same = known[: min(same_tokens, len(tokens)) // BLOCK_TOKENS]
    spans = list(takewhile(lambda s: s.is_full and s.lineage == lineage.at(s.end), same))
    for start in range(len(spans) * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        before = spans[-1] if spans else None
        piece = tokens[start : start + BLOCK_TOKENS]
        spans.append(_span_behind(salt, fingerprint, piece, before, lineage))
    return tuple(spans)


def span_ending(
    salt: bytes,
    fingerprint: Fingerprint,
    tokens: Sequence[int],
    spans: Sequence[BlockSpan],
    end: int,
    lineage: EditLineage = UNEDITED,
) -> BlockSpan:
    """Return the block of `tokens` that ends at token `end`, cut short if it must be."""
    assert 0 < end <= spans[-1].end, "the block ends within the tokens"
    index = (end - 1) // BLOCK_TOKENS
    whole = spans[index]
    if whole.end == end:
        return whole
    before = spans[index - 1] if index else None
    return _span_behind(salt, fingerprint, tokens[whole.start : end], before, lineage)


def _span_behind(
    salt: bytes,
    fingerprint: Fingerprint,
    tokens: Sequence[int],
    before: BlockSpan | None,
    lineage: EditLineage,
) -> BlockSpan:
    start, parent = (before.end, before.block_hash) if before else (0, ROOT_PARENT)
    end = start + len(tokens)
    edits = lineage.at(end)
    if edits:
        parent = edited_parent(salt, parent, edits)
    name = block_hash(salt, fingerprint, parent, tokens)
    return BlockSpan(start, end, parent, name, lineage=edits)
