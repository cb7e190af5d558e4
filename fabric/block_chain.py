"""Cut a token sequence into blocks and name each by everything up to its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from fabric.hashing import ROOT_PARENT, block_hash
from fabric.ids import BlockHash, Fingerprint
from fabric.limits import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Tokens `start:end` of a sequence as the block `block_hash` behind `parent`."""

    start: int
    end: int
    parent: BlockHash
    block_hash: BlockHash

    @property
    def is_full(self) -> bool:
        """Say whether the block holds 256 tokens and may be shared as a prefix."""
        return self.end - self.start == BLOCK_TOKENS


def block_spans(
    salt: bytes, fingerprint: Fingerprint, tokens: Sequence[int]
) -> tuple[BlockSpan, ...]:
    """List the blocks of `tokens` in order; the last one may be partial (the tail)."""
    spans = []
    parent = ROOT_PARENT
    for start in range(0, len(tokens), BLOCK_TOKENS):
        piece = tokens[start : start + BLOCK_TOKENS]
        name = block_hash(salt, fingerprint, parent, piece)
        spans.append(BlockSpan(start, start + len(piece), parent, name))
        parent = name
    return tuple(spans)
