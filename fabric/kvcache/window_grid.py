"""Window grid: rows that window layers need of an edited cache, and blocks that store them.

    cache   0 .......... exact ...(moved)... [ hole )(ahead)[ hole )(ahead) head ........
    blocks  [ 256 )[ 256 )          none     [256)[rest)     [rest)        [ 256 )[ 256 )

Tokens computed after the ahead rows see the last tokens before them only. So moved rows are
needed for one window before each hole, and for one before the end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fabric.kvcache.arrangement import Arrangement, Range
from fabric.limits import AGENT_TOKENS_MAX, BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """Positions at which blocks of a cache start.

    They have 256 tokens before `exact_tokens` and in each computed range. Rows of computed ranges
    are stored as they slide away; all others are parts of older blocks.
    """

    exact_tokens: int
    computed_ranges: tuple[Range, ...]

    def block_start(self, position: int) -> int:
        """Return the start of the block of a token; for a moved token, its own position."""
        if position < self.exact_tokens:
            return position // BLOCK_TOKENS * BLOCK_TOKENS
        for start, end in reversed(self.computed_ranges):
            if start <= position < end:
                return position - (position - start) % BLOCK_TOKENS
        return position

    def blocks(self, first: int, until: int) -> Iterator[Range]:
        """Yield blocks of computed ranges that start at `first` or later and end by `until`."""
        for start, end in self.computed_ranges:
            skipped = max(0, -(-(first - start) // BLOCK_TOKENS))
            for at in range(start + skipped * BLOCK_TOKENS, min(end, until), BLOCK_TOKENS):
                block_end = min(at + BLOCK_TOKENS, end)
                if block_end <= until:
                    yield at, block_end

    def needed_from(self, tokens_count: int, window_tokens: int) -> int:
        """Return the first row that is held for a token at `tokens_count`.

        Its block is not full yet, or will be stored as a whole: so none is held in part.
        """
        first = max(0, tokens_count - window_tokens + 1)
        return self.block_start(min(first, tokens_count))

    def needed(self, arrangement: Arrangement, window_tokens: int) -> tuple[Range, ...]:
        """Return the rows that must be there: before the next token, and before each hole.

        One range for the beginning and one for each that lies ahead; none is needed of a hole.
        """
        count = arrangement.tokens_count
        ranges = [(self.needed_from(count, window_tokens), count)]
        for start, end in arrangement.ahead:
            ranges.append((max(start, self.needed_from(end, window_tokens)), end))
        return tuple(ranges)


UNEDITED_GRID: Final = WindowGrid(0, ((0, AGENT_TOKENS_MAX),))
