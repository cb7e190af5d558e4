"""Block chain: a token sequence cut into blocks, each named by a hash of all tokens up to its end.

Rows computed after an edit differ from what their tokens alone would give, because they attended
to the removed tokens. So block names also cover the edits: a lookup for edited tokens never finds
an unedited block, nor the reverse.

    unedited   0 [ 256 )[ 256 )[ tail )
    edited     0 ( parts of older blocks ) start [ 256 )[ 256 )[ tail )
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from fabric.ids import BlockHash, Checksum, Fingerprint
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import ROOT_PARENT, block_hash, edited_parent, group_hash
from fabric.limits import BLOCK_TOKENS
from fabric.u32s import U32s


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Reference to immutable bytes: two blocks are the same only if hash and checksum are.

    The hash identifies the tokens and all before them; the checksum the bits. Two Macs may
    compute one block with different rounding, and an agent must get back its own bits.
    """

    block_hash: BlockHash
    checksum: Checksum
    tokens_count: int
    payload_bytes: int
    group: CacheGroup = CacheGroup.FULL

    def __hash__(self) -> int:
        """Hash the bits' checksum only; refs are hashed thousands of times in every turn."""
        return hash(self.checksum)

    @property
    def name(self) -> str:
        """File name stem: hex digests only, so no outside text reaches a path."""
        return f"{self.block_hash.hex()}-{self.checksum.hex()}"


@dataclass(frozen=True, slots=True)
class EditLineage:
    """Edits of a cache: the first token after all of them, and a digest of what comes before.

    Blocks start again at `start`; before it they are parts of older ones.
    """

    start: int
    digest: bytes


UNEDITED: Final = EditLineage(0, b"")


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Tokens `start:end` of a sequence as the block `block_hash` after `parent`.

    `own_tokens`: of a block that the sequence has a part of only.
    """

    start: int
    end: int
    parent: BlockHash
    block_hash: BlockHash
    group: CacheGroup = CacheGroup.FULL
    lineage: bytes = b""
    own_tokens: U32s | None = None

    def in_group(self, salt: bytes, group: CacheGroup) -> "BlockSpan":
        """Return the block of another group of layers for the same tokens."""
        name = group_hash(salt, self.block_hash, group)
        return replace(self, block_hash=name, group=group)

    @property
    def is_full(self) -> bool:
        """Return whether the block holds 256 tokens and may be shared as a prefix."""
        return self.end - self.start == BLOCK_TOKENS

    def tokens_in(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the block's tokens, of a sequence that it is in."""
        return tokens[self.start : self.end] if self.own_tokens is None else self.own_tokens

    def names(self, ref: BlockRef) -> bool:
        """Return whether it is what a stored block is called."""
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

    For edited tokens, those after the edits, from where the lineage starts.

    `known` are the blocks of a sequence that begins with the same `same_tokens` tokens: those
    within them are not hashed again, unless they were computed after other edits.
    """
    same = known[: max(0, min(same_tokens, len(tokens)) - lineage.start) // BLOCK_TOKENS]
    if same and same[0].start != lineage.start:
        same = ()
    spans = list(takewhile(lambda s: s.is_full and s.lineage == lineage.digest, same))
    for start in range(lineage.start + len(spans) * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        before = spans[-1] if spans else None
        piece = tokens[start : start + BLOCK_TOKENS]
        spans.append(_span_after(salt, fingerprint, piece, before, lineage))
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
    assert lineage.start < end <= spans[-1].end, "the block ends within the tokens"
    index = (end - 1 - lineage.start) // BLOCK_TOKENS
    whole = spans[index]
    if whole.end == end:
        return whole
    before = spans[index - 1] if index else None
    return _span_after(salt, fingerprint, tokens[whole.start : end], before, lineage)


def _span_after(
    salt: bytes,
    fingerprint: Fingerprint,
    tokens: Sequence[int],
    before: BlockSpan | None,
    lineage: EditLineage,
) -> BlockSpan:
    if before is not None:
        start, parent = before.end, before.block_hash
    else:
        start, parent = lineage.start, ROOT_PARENT
        if lineage.digest:
            parent = edited_parent(salt, ROOT_PARENT, lineage.digest)
    name = block_hash(salt, fingerprint, parent, tokens)
    return BlockSpan(start, start + len(tokens), parent, name, lineage=lineage.digest)
