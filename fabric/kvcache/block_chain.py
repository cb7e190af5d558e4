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
    """Reference to an immutable block: by the hash of its tokens, and the checksum of its bytes.

    The hash covers the block's tokens and all tokens before them. Two Macs may compute the same
    tokens with different rounding, and an agent must get back its own bytes.
    """

    block_hash: BlockHash
    checksum: Checksum
    tokens_count: int
    payload_bytes: int
    group: CacheGroup = CacheGroup.FULL

    def __hash__(self) -> int:
        """Hash the checksum only, for speed: a turn hashes thousands of refs."""
        return hash(self.checksum)

    @property
    def name(self) -> str:
        """Stem of the file name: hex digits only, so no client's text reaches a path."""
        return f"{self.block_hash.hex()}-{self.checksum.hex()}"


@dataclass(frozen=True, slots=True)
class EditLineage:
    """Lineage of an edited cache: the first token after its last edit, and a digest of the rest.

    New blocks begin at `start`; before it, the cache consists of parts of older blocks.
    """

    start: int
    digest: bytes


UNEDITED: Final = EditLineage(0, b"")


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Block of a sequence: its tokens `start:end`, its hash, and its parent's hash.

    `own_tokens` are the block's tokens if the sequence has only a part of them.
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
        """Return the block's tokens, given the tokens of the sequence."""
        return tokens[self.start : self.end] if self.own_tokens is None else self.own_tokens

    def names(self, ref: BlockRef) -> bool:
        """Return whether a stored block has this hash and group."""
        return (ref.block_hash, ref.group) == (self.block_hash, self.group)


def block_spans(
    salt: bytes,
    fingerprint: Fingerprint,
    tokens: Sequence[int],
    known: Sequence[BlockSpan] = (),
    same_tokens: int = 0,
    lineage: EditLineage = UNEDITED,
) -> tuple[BlockSpan, ...]:
    """List the blocks of `tokens` in order, from `lineage.start` on; the last may be partial.

    `known` are the blocks of a sequence whose first `same_tokens` tokens are the same: its blocks
    within them are not hashed again if they have the same lineage.
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
    """Return the block of `tokens` that ends at token `end`, a shortened one if necessary."""
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
