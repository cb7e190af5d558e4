"""A sliding-window layer: holds the last tokens only, in order, without rotating.

Tokens are appended until the capacity is used up; then the ones still visible move to the front
(`ResidentCache.slide`). A window's worth is copied once in 256 tokens, and masks,
files and restores see plain ascending positions.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from fabric.kvcache.arrangement import Range
from node.mlx.resident_layer import ResidentLayer
from node.mlx.token_store import TokenStore, round_up


class WindowLayer(ResidentLayer):
    """Resident cache of a layer whose tokens see `window_tokens` tokens, themselves included."""

    def first_seen(self) -> int:
        """Return the first position that the next token attends to."""
        return max(0, self.offset - self.spec.window_tokens + 1)

    def keep_from(self, base: int, capacity_tokens: int) -> None:
        """Drop the tokens before position `base`; leave room for `capacity_tokens`."""
        assert self.base <= base <= self.offset, "only held tokens can be kept"
        if base == self.base and round_up(capacity_tokens) == self.capacity_tokens:
            return
        for store in self._stores:
            store.keep(base - self.base, self.offset - self.base, capacity_tokens)
        self.base = base

    @property
    def stores(self) -> tuple[TokenStore, ...]:
        """Stores of its vectors."""
        return self._stores

    def with_room(self, tokens_count: int) -> "WindowLayer":
        """Return an empty layer like this one, with room for `tokens_count` tokens or more."""
        return type(self)(self.spec, tokens_count, packed=self._packed)

    def copy_ranges(self, ranges: Sequence[Range]) -> "WindowLayer":
        """Return a layer like this one with copies of these tokens alone."""
        copy = self.with_room(0)
        for store, own in zip(copy.stores, self.stores, strict=True):
            store.copy_from(own, [(a - self.base, b - self.base) for a, b in ranges])
        return copy

    def append_rows(
        self, rows: "WindowLayer", keep_from: int, start: int, capacity_tokens: int
    ) -> None:
        """Append another layer's rows at `start`, and drop this layer's rows before `keep_from`.

        This layer's rows end at `start`, or none of them is kept.
        """
        keep = min(max(keep_from, self.base), start)
        assert start in (keep, self.offset), "rows are contiguous"
        for store, other in zip(self.stores, rows.stores, strict=True):
            capacity = start - keep + capacity_tokens
            store.append_store(keep - self.base, start - self.base, other, capacity)
        self.base = keep

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Build the mask over the fetched tokens for `n` new ones."""
        window = self.spec.window_tokens
        before = self.offset - self.first_seen()
        if n == 1 and (window_size is None or window_size >= window):
            return None
        if before + n <= window and window_size in (None, window) and not return_array:
            return "causal"
        return create_causal_mask(n, before, window_size=window_size or window)


class ChunkLayer(WindowLayer):
    """A layer whose tokens attend only to their own chunk of `window_tokens`."""

    def first_seen(self) -> int:
        """Return the first position that the next token attends to."""
        return self.offset // self.spec.window_tokens * self.spec.window_tokens

    @property
    def start_position(self) -> int:
        """First fetched position, from which models count their own mask."""
        return self.first_seen()

    def maybe_trim_front(self) -> None:
        """Do nothing: `ResidentCache.slide` drops rows that are no longer visible."""

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Build the mask over the fetched tokens for `n` new ones."""
        chunk = self.spec.window_tokens
        rows = mx.arange(self.offset, self.offset + n)[:, None]
        columns = mx.arange(self.first_seen(), self.offset + n)
        return (columns <= rows) & (columns // chunk == rows // chunk)
