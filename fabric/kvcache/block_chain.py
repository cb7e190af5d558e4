"""Cut a token sequence into blocks and name each by everything up to its end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fabric.ids import BlockHash, Fingerprint
from fabric.kvcache.cache_spec import CacheGroup
from fabric.kvcache.hashing import ROOT_PARENT, block_hash, group_hash
from fabric.limits import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Tokens `start:end` of a sequence as the block `block_hash` behind `parent`."""

    start: int
    end: int
    parent: BlockHash
    block_hash: BlockHash
    group: CacheGroup = CacheGroup.FULL

    def in_group(self, salt: bytes, group: CacheGroup) -> "BlockSpan":
        """Return the block of another group of layers for the same tokens."""
        name = group_hash(salt, self.block_hash, group)
        return replace(self, block_hash=name, group=group)

    @property
    def is_full(self) -> bool:
        """Say whether the block holds 256 tokens and may be shared as a prefix."""
        return self.end - self.start == BLOCK_TOKENS


def block_spans(
    salt: bytes,
    fingerprint: Fingerprint,
    tokens: Sequence[int],
    known: Sequence[BlockSpan] = (),
    same_tokens: int = 0,
) -> tuple[BlockSpan, ...]:
    """List the blocks of `tokens` in order; the last one may be partial (the tail).

    `known` are the blocks of a sequence that begins with the same `same_tokens` tokens: those
    within them are not hashed again.
    """
    spans = list(known[: min(same_tokens, len(tokens)) // BLOCK_TOKENS])
    if spans and not spans[-1].is_full:
        del spans[-1]
    parent = spans[-1].block_hash if spans else ROOT_PARENT
    for start in range(len(spans) * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
        piece = tokens[start : start + BLOCK_TOKENS]
        name = block_hash(salt, fingerprint, parent, piece)
        spans.append(BlockSpan(start, start + len(piece), parent, name))
        parent = name
    return tuple(spans)


def span_ending(
    salt: bytes,
    fingerprint: Fingerprint,
    tokens: Sequence[int],
    spans: Sequence[BlockSpan],
    end: int,
) -> BlockSpan:
    """Return the block of `tokens` that ends at token `end`, cut short if it must be."""
    assert 0 < end <= spans[-1].end, "the block ends within the tokens"
    whole = spans[(end - 1) // BLOCK_TOKENS]
    if whole.end == end:
        return whole
    name = block_hash(salt, fingerprint, whole.parent, tokens[whole.start : end])
    return replace(whole, end=end, block_hash=name)
