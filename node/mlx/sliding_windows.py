"""All window layers of one sequence: their rows, the blocks of these, and rows held beside them.

layers  base ..... tokens_count [ hole )
beside                                  ahead [ last window of it )
"""

from collections.abc import Iterator, Sequence
from typing import Any

from fabric.kvcache.arrangement import Arrangement, Move, Range
from fabric.kvcache.window_grid import UNEDITED_GRID, WindowGrid
from node.mlx.token_store import GROWTH_TOKENS
from node.mlx.window_layer import WindowLayer
from node.mlx.window_rows import ReadRows, WindowRows, can_be_moved
from node.store.staging import Place


class SlidingWindows:
    """The window layers among `leaves`, if any; they hold tokens from `base` on."""

    def __init__(self, leaves: Sequence[Any], window_tokens: int) -> None:
        self.leaves = [leaf for leaf in leaves if isinstance(leaf, WindowLayer)]
        self.grid = UNEDITED_GRID
        self.beside: tuple[WindowRows | ReadRows, ...] = ()  # for each range of tokens ahead
        self.copied_out = 0  # blocks before this token were stored or copied out
        self._window_tokens = window_tokens

    @property
    def base(self) -> int:
        """First token that the layers hold."""
        return self.leaves[0].base if self.leaves else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows held beside the layers."""
        return sum(rows.size_bytes for rows in self.beside)

    def needed_from(self, tokens_count: int) -> int:
        """Return the start of the first block that a token at `tokens_count` still sees."""
        return self.grid.needed_from(tokens_count, self._window_tokens) if self.leaves else 0

    def keep_from(self, base: int, capacity_tokens: int) -> None:
        """Drop the tokens before `base`; leave room for `capacity_tokens` from there on."""
        for layer in self.leaves:
            layer.keep_from(base, capacity_tokens)

    def due(self, until: int) -> Iterator[Range]:
        """Yield the blocks before `until` that are neither stored nor copied out yet."""
        for start, end in self.grid.blocks(self.copied_out, until):
            if start >= self.base:
                yield start, end
        self.copied_out = max(self.copied_out, until)

    def cut(self, tokens_count: int, grid: WindowGrid) -> None:
        """Record that only the first tokens are left, in blocks of `grid`."""
        self.grid, self.beside = grid, ()
        self.copied_out = min(self.copied_out, grid.block_start(tokens_count))

    def hold(self, tokens_count: int, grid: WindowGrid) -> None:
        """Record that the first tokens were read, in blocks of `grid`."""
        self.grid, self.copied_out = grid, grid.block_start(tokens_count)

    # --- rows held beside the layers ---------------------------------------------------------

    def place(self, base: int) -> None:
        """Set the base of empty layers."""
        self.beside = ()
        for layer in self.leaves:
            layer.base = base

    def place_edited(self, to: Arrangement, grid: WindowGrid) -> list[tuple[Range, list[Place]]]:
        """Reserve room in empty layers and beside them; return the destinations of the rows.

        Any thread may call this: it computes nothing.
        """
        if not self.leaves:
            return []
        first, *others = grid.needed(to, self._window_tokens)
        self.place(first[0])
        begun = WindowRows(*first, tuple(self.leaves))
        room = min(layer.capacity_tokens for layer in self.leaves)
        assert first[1] - first[0] <= room, "windows and the blocks around them fit"
        self.beside = tuple(ReadRows.empty(self.leaves, place) for place in others)
        return [((rows.start, rows.end), rows.views()) for rows in (begun, *self.beside)]

    def can_move(
        self, after: Arrangement, moves: Sequence[Move], grid: WindowGrid, tokens_count: int
    ) -> bool:
        """Return whether the layers hold the visible rows before every place of moved tokens."""
        places = grid.needed(after, self._window_tokens) if self.leaves else ()
        return can_be_moved(places, moves, (self.base, tokens_count))

    def moved(
        self, after: Arrangement, moves: Sequence[Move], grid: WindowGrid
    ) -> list[WindowRows]:
        """Copy the visible rows of moved tokens, before every range to compute."""
        places = grid.needed(after, self._window_tokens) if self.leaves else ()
        return [WindowRows.moved(self.leaves, place, moves) for place in places]

    def take(self, rows: Sequence[WindowRows], grid: WindowGrid) -> None:
        """Hold only the first of these rows, with the others beside the layers."""
        for first in rows[:1]:
            self.place(first.start)
            first.put_behind(self.leaves, first.start, GROWTH_TOKENS)
        self.grid, self.beside, self.copied_out = grid, tuple(rows[1:]), 0

    def go_on_ahead(self, keep_from: int) -> None:
        """Append the rows held for a filled hole; keep present rows from `keep_from` on."""
        rows, *others = self.beside
        rows.put_behind(self.leaves, keep_from, GROWTH_TOKENS)
        self.beside = tuple(others)
