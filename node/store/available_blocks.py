"""The stored blocks of one context: what a record lists, and what of it can be used."""

from dataclasses import dataclass, field

from fabric.kvcache.block import BlockRef
from fabric.limits import AGENT_TOKENS_MAX
from fabric.record.manifest import Manifest
from fabric.record.restore_plan import Stored


@dataclass(slots=True)
class AvailableBlocks:
    """The stored blocks of one context; what fails to load is taken out."""

    full: list[BlockRef] = field(default_factory=list)
    windows: dict[int, BlockRef] = field(default_factory=dict)  # by first token
    states: dict[int, BlockRef] = field(default_factory=dict)  # by the token behind the last

    def stored(self, tokens_count: int) -> Stored:
        """Say what there is of a context of `tokens_count` tokens."""
        covered = sum(ref.tokens_count for ref in self.full)
        ends = {start: start + ref.tokens_count for start, ref in self.windows.items()}
        return Stored(min(covered, tokens_count), ends, self.states.keys())

    def refs(self) -> list[BlockRef]:
        return [*self.full, *self.windows.values(), *self.states.values()]


def available_blocks(
    record: Manifest | None, tokens_max: int = AGENT_TOKENS_MAX
) -> AvailableBlocks:
    """List the blocks of a record's first tokens, as far as they can be used as they are."""
    available = AvailableBlocks()
    if record is None:
        return available
    end = 0
    for piece in record.pieces:
        end += piece.end - piece.start
        if not piece.is_whole or end > tokens_max:
            break
        available.full.append(piece.block)
    available.windows = {p.start: p.block for p in record.windows if p.end <= tokens_max}
    available.states = {p.end: p.block for p in record.states if p.end <= tokens_max}
    return available


def tokens_in_common(record: Manifest | None, available: AvailableBlocks, tokens_max: int) -> int:
    """Count the leading tokens of which a record has the very blocks that are available."""
    end = 0
    for ours, theirs in zip(
        available_blocks(record, tokens_max).full, available.full, strict=False
    ):
        if ours != theirs:
            break
        end += ours.tokens_count
    return end
