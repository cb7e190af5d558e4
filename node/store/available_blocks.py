"""The stored blocks of one context: what a record lists, and what of it can be used."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from fabric.kvcache.block import BlockRef
from fabric.limits import AGENT_TOKENS_MAX, BLOCK_TOKENS
from fabric.record.manifest import Manifest
from fabric.record.piece_table import PieceTable
from fabric.record.restore_plan import Stored
from fabric.u32s import U32s


@dataclass(slots=True)
class AvailableBlocks:
    """The stored blocks of one context; what fails to load is taken out."""

    full: PieceTable = field(default_factory=PieceTable)  # whole blocks, each in its own place
    windows: dict[int, BlockRef] = field(default_factory=dict)  # by first token
    states: dict[int, BlockRef] = field(default_factory=dict)  # by the token behind the last

    def stored(self, tokens_count: int) -> Stored:
        """Say what there is of a context of `tokens_count` tokens."""
        ends = {start: start + ref.tokens_count for start, ref in self.windows.items()}
        return Stored(min(self.full.tokens_count, tokens_count), ends, self.states.keys())

    def without(self, lost: AbstractSet[BlockRef]) -> "AvailableBlocks":
        """Return what there is where `lost` are none of them stored."""
        if not lost:
            return self
        return AvailableBlocks(
            self.full.slice(0, self.full.tokens_before(lost)),
            {start: ref for start, ref in self.windows.items() if ref not in lost},
            {end: ref for end, ref in self.states.items() if ref not in lost},
        )

    def refs(self) -> list[BlockRef]:
        return [*self.full.blocks, *self.windows.values(), *self.states.values()]


def available_blocks(
    record: Manifest | None, tokens_max: int = AGENT_TOKENS_MAX
) -> AvailableBlocks:
    """List the blocks of a record's first tokens, up to its first edit."""
    available = AvailableBlocks()
    if record is None:
        return available
    if record.edited is not None:
        tokens_max = min(tokens_max, record.edited.exact_tokens)
    available.full = record.pieces.unedited(tokens_max)
    count = available.full.tokens_count
    available.windows = {p.start: p.block for p in record.windows if p.end <= count}
    available.states = {p.end: p.block for p in record.states if p.end <= tokens_max}
    return available


def exact_beginning(record: Manifest) -> tuple[U32s, AvailableBlocks]:
    """Return the tokens of a record before its first edit, and the blocks of these.

    The block that this edit cut is whole as it is stored: its tokens are those from before, as its
    name and all those behind it say.
    """
    available, head, ids = available_blocks(record), record.edited, record.token_ids
    if head is None:
        return ids, available
    count, start = len(available.full), available.full.tokens_count
    ids = ids[:start]
    is_full = start % BLOCK_TOKENS == 0  # behind another no block goes on
    if is_full and count < len(head.origins):
        cut = record.pieces[count]
        if (cut.start, cut.delta) == (0, 0):
            ids += head.origins[count].tokens
            available.full = available.full.append([cut.block])
            end = start + cut.tokens_count
            available.windows.update((start, p.block) for p in record.windows if p.end == end)
    return ids, available
