"""All window layers of one sequence: their rows, their blocks, and rows held for after a hole.

Window layers hold one contiguous run of tokens. Rows after a hole are held beside them:

    layers  base ..... tokens_count [ hole )
    beside                                  ahead [ last window of it )

Once the hole is filled, the held rows are appended to the layers, and rows outside the window are
dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from fabric.kvcache.arrangement import UNEDITED_GRID, Arrangement, Move, Range, WindowGrid
from node.mlx.resident_layer import rows_of
from node.mlx.token_store import GROWTH_TOKENS
from node.mlx.window_layer import WindowLayer
from node.store.staging import Place


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Tokens `start:end` of all window layers."""

    start: int
    end: int
    leaves: tuple[WindowLayer, ...]

    @classmethod
    def empty(cls, like: Sequence[WindowLayer], place: Range) -> "WindowRows":
        """Return uninitialized rows for the range `place`, to read into."""
        start, end = place
        leaves = tuple(leaf.with_room(end - start) for leaf in like)
        mx.eval([leaf.state for leaf in leaves])
        return cls(start, end, leaves)

    @classmethod
    def moved(
        cls, leaves: Sequence[WindowLayer], place: Range, moves: Sequence[Move]
    ) -> "WindowRows":
        """Copy the rows that moves bring to `place`."""
        parts = [source for move in moves if (source := _source(move, place)) is not None]
        copy = tuple(leaf.copy_ranges(parts) for leaf in leaves)
        mx.eval([leaf.state for leaf in copy])
        return cls(*place, copy)

    @property
    def size_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def views(self) -> list[Place]:
        """Return writable views of its rows, in the order of a block file."""
        return [row[:, : self.end - self.start] for row in rows_of(self.leaves)]

    def append_to(self, leaves: Sequence[WindowLayer], keep_from: int, room_tokens: int) -> None:
        """Append the rows to the layers, and drop the layers' rows before `keep_from`."""
        for leaf, own in zip(leaves, self.leaves, strict=True):
            leaf.append_rows(own, keep_from, self.start, self.end - self.start + room_tokens)
        mx.eval([leaf.state for leaf in leaves])


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Window rows as bytes, into which any thread may read from disk."""

    start: int
    end: int
    rows: tuple[Place, ...]

    @classmethod
    def empty(cls, like: Sequence[WindowLayer], place: Range) -> "ReadRows":
        """Return uninitialized rows for the range `place`, to read into."""
        start, end = place
        shapes = [(row.shape[0], end - start, row.shape[2]) for row in rows_of(like)]
        return cls(start, end, tuple(np.empty(shape, np.uint8) for shape in shapes))

    @property
    def size_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def views(self) -> list[Place]:
        """Return writable views of its rows, in the order of a block file."""
        return list(self.rows)

    def append_to(self, leaves: Sequence[WindowLayer], keep_from: int, room_tokens: int) -> None:
        """Append the rows to the layers, and drop the layers' rows before `keep_from`."""
        merged = WindowRows.empty(leaves, (self.start, self.end))
        for view, row in zip(merged.views(), self.rows, strict=True):
            view[:] = row
        merged.append_to(leaves, keep_from, room_tokens)


def can_be_moved(places: Sequence[Range], moves: Sequence[Move], held: Range) -> bool:
    """Return whether the range `held` contains all rows that `moves` bring to `places`."""
    sources = [_source(move, place) for place in places for move in moves]
    return all(
        held[0] <= source[0] and source[1] <= held[1] for source in sources if source is not None
    )


def _source(move: Move, place: Range) -> Range | None:
    """Return the rows that a move brings to `place`."""
    start, end = max(move.new_start, place[0]), min(move.new_end, place[1])
    by = move.new_start - move.start
    return (start - by, end - by) if start < end else None


class SlidingWindows:
    """The window layers of one sequence, if any; they hold tokens from `base` on."""

    def __init__(self, leaves: Sequence[Any], window_tokens: int) -> None:
        self.leaves = [leaf for leaf in leaves if isinstance(leaf, WindowLayer)]
        self.grid = UNEDITED_GRID
        self.beside: tuple[WindowRows | ReadRows, ...] = ()  # one entry per range of tokens ahead
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
        """Return the start of the first block that a token at `tokens_count` attends to."""
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
        """Return whether the layers hold all rows that they need after the moves."""
        places = grid.needed(after, self._window_tokens) if self.leaves else ()
        return can_be_moved(places, moves, (self.base, tokens_count))

    def moved(
        self, after: Arrangement, moves: Sequence[Move], grid: WindowGrid
    ) -> list[WindowRows]:
        """Copy the moved rows that tokens in holes and at the end attend to."""
        places = grid.needed(after, self._window_tokens) if self.leaves else ()
        return [WindowRows.moved(self.leaves, place, moves) for place in places]

    def take(self, rows: Sequence[WindowRows], grid: WindowGrid) -> None:
        """Replace the layers' rows by the first of `rows`, and hold the others beside them."""
        for first in rows[:1]:
            self.place(first.start)
            first.append_to(self.leaves, first.start, GROWTH_TOKENS)
        self.grid, self.beside, self.copied_out = grid, tuple(rows[1:]), 0

    def append_held_rows(self, keep_from: int) -> None:
        """Append the rows held after a filled hole; drop the layers' rows before `keep_from`."""
        rows, *others = self.beside
        rows.append_to(self.leaves, keep_from, GROWTH_TOKENS)
        self.beside = tuple(others)
