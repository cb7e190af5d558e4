"""The window layer of the simulated model: its last entries, and ranges that lie ahead."""

import numpy as np
from xxhash import xxh3_64_digest

from fabric.kvcache.arrangement import UNEDITED_GRID
from node.mlx.sliding_windows import can_be_moved
from tests.sim.rows import Growth

WINDOW_ENTRY_BYTES = 4
WINDOW_TOKENS = 100
_GROWTH_TOKENS = 64


def window_entry(entry):
    """Return a token's entry in the window layer, given its entry in the full layer."""
    return xxh3_64_digest(entry, 1)[:WINDOW_ENTRY_BYTES]


class SimWindow:
    """The interface of SlidingWindows, for one layer of a few bytes, or none without tokens."""

    def __init__(self, window_tokens):
        self.tokens = window_tokens
        self.rows = np.zeros((0, WINDOW_ENTRY_BYTES), np.uint8)
        self.base = self.copied_out = 0
        self.grid = UNEDITED_GRID
        self.beside = []  # [start, end, rows] for each range that lies ahead

    @property
    def size_bytes(self):
        return self.rows.nbytes + sum(rows.nbytes for _, _, rows in self.beside)

    def needed_from(self, tokens_count):
        return self.grid.needed_from(tokens_count, self.tokens) if self.tokens else 0

    def append(self, entry, place):
        if self.tokens:
            self.grow(place + 1)
            self.rows[place - self.base] = np.frombuffer(window_entry(entry), np.uint8)

    def grow(self, tokens_count):
        if tokens_count - self.base > len(self.rows):
            Growth.count += 1
            more = np.zeros((_GROWTH_TOKENS, WINDOW_ENTRY_BYTES), np.uint8)
            while tokens_count - self.base > len(self.rows):
                self.rows = np.concatenate([self.rows, more])

    def seen(self, tokens_count):
        first = min(max(0, tokens_count - self.tokens + 1), tokens_count)
        assert first >= self.base or not self.tokens, "the window holds what the next token sees"
        return self.rows[first - self.base : tokens_count - self.base].tobytes()

    def due(self, until):
        for start, end in self.grid.blocks(self.copied_out, until):
            if start >= self.base:
                yield start, end
        self.copied_out = max(self.copied_out, until)

    def keep_from(self, base):
        self.rows = self.rows[base - self.base :].copy()
        self.base = base

    # --- edited and moved rows ---------------------------------------------------------------

    def needed(self, after, grid):
        return grid.needed(after, self.tokens) if self.tokens else ()

    def can_move(self, after, moves, grid, tokens_count):
        return can_be_moved(self.needed(after, grid), moves, (self.base, tokens_count))

    def moved(self, after, moves, grid):
        found = []
        for start, end in self.needed(after, grid):
            rows = np.zeros((end - start, WINDOW_ENTRY_BYTES), np.uint8)
            for move in moves:
                first, last = max(start, move.new_start), min(end, move.new_end)
                if first < last:
                    at = move.start - move.new_start - self.base
                    rows[first - start : last - start] = self.rows[first + at : last + at]
            found.append([start, end, rows])
        return found

    def take(self, found, grid):
        Growth.count += 1
        if found:
            self.base, _, self.rows = found[0]
        self.grid, self.beside, self.copied_out = grid, found[1:], 0

    def place_edited(self, to, grid):
        empty = self.moved(to, (), grid)
        self.take(empty, grid)
        return [((start, end), [rows[None]]) for start, end, rows in empty]

    def append_held_rows(self, keep_from, tokens_count):
        (start, _, rows), *self.beside = self.beside
        keep = min(max(keep_from, self.base), start)
        own = self.rows[keep - self.base : start - self.base]
        assert tokens_count == start or not len(own), "rows adjoin"
        self.base, self.rows = keep, np.concatenate([own, rows])
        Growth.count += 1

    def copy(self):
        made = SimWindow(self.tokens)
        made.rows, made.base, made.grid = self.rows.copy(), self.base, self.grid
        made.copied_out = self.copied_out
        return made
