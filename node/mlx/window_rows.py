"""Rows of window layers, held for positions that their layers do not reach yet.

    layers  base ..... tokens_count [ hole )
    beside                                  ahead [ last window of it )

When the hole is filled, the layers continue after the rows ahead of it: the last window of these is
appended, and rows that are no longer visible are dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from fabric.kvcache.arrangement import Move, Range
from node.mlx.row_views import rows_of
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
        """Return room for rows to be read."""
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
        made = tuple(leaf.picked(parts) for leaf in leaves)
        mx.eval([leaf.state for leaf in made])
        return cls(*place, made)

    @property
    def size_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def views(self) -> list[Place]:
        """Return writable views of its rows, in the order of a block file."""
        return [row[:, : self.end - self.start] for row in rows_of(self.leaves)]

    def put_behind(self, leaves: Sequence[WindowLayer], keep_from: int, room_tokens: int) -> None:
        """Append the rows to the layers, which keep present rows from `keep_from` on."""
        for leaf, own in zip(leaves, self.leaves, strict=True):
            leaf.go_on_behind(own, keep_from, self.start, self.end - self.start + room_tokens)
        mx.eval([leaf.state for leaf in leaves])


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Window rows as bytes, into which any thread may read from disk."""

    start: int
    end: int
    rows: tuple[Place, ...]

    @classmethod
    def empty(cls, like: Sequence[WindowLayer], place: Range) -> "ReadRows":
        """Return room for rows to be read."""
        start, end = place
        shapes = [(row.shape[0], end - start, row.shape[2]) for row in rows_of(like)]
        return cls(start, end, tuple(np.empty(shape, np.uint8) for shape in shapes))

    @property
    def size_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def views(self) -> list[Place]:
        """Return writable views of its rows, in the order of a block file."""
        return list(self.rows)

    def put_behind(self, leaves: Sequence[WindowLayer], keep_from: int, room_tokens: int) -> None:
        """Append the rows to the layers, which keep present rows from `keep_from` on."""
        made = WindowRows.empty(leaves, (self.start, self.end))
        for view, row in zip(made.views(), self.rows, strict=True):
            view[:] = row
        made.put_behind(leaves, keep_from, room_tokens)


def can_be_moved(places: Sequence[Range], moves: Sequence[Move], held: Range) -> bool:
    """Return whether all rows that moves bring to `places` are held."""
    sources = [_source(move, place) for place in places for move in moves]
    return all(
        held[0] <= source[0] and source[1] <= held[1] for source in sources if source is not None
    )


def _source(move: Move, place: Range) -> Range | None:
    """Return the rows that a move brings to `place`."""
    start, end = max(move.new_start, place[0]), min(move.new_end, place[1])
    by = move.new_start - move.start
    return (start - by, end - by) if start < end else None
