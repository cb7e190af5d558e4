"""A sliding-window layer: holds the last tokens only, in order, without rotating.

Tokens are appended behind each other until the room is used up; then the ones still seen move
to the front (`ResidentCache.slide`). A window's worth is copied once in 256 tokens, and masks,
files and restores see plain ascending positions.
"""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from node.mlx.resident_layer import ResidentLayer
from node.mlx.token_store import round_up


class WindowLayer(ResidentLayer):
    """Resident cache of a layer whose tokens see `window_tokens` tokens, themselves included."""

    def first_seen(self) -> int:
        """Return the first position that the next token attends to."""
        return max(0, self.offset - self.spec.window_tokens + 1)

    def keep_from(self, base: int, capacity_tokens: int) -> None:
        """Forget the tokens before position `base`; leave room for `capacity_tokens`."""
        assert self.base <= base <= self.offset, "keep tokens that are held"
        if base == self.base and round_up(capacity_tokens) == self.capacity_tokens:
            return
        for store in self._stores:
            store.keep(base - self.base, self.offset - self.base, capacity_tokens)
        self.base = base

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Build the mask over the tokens that are fetched for `n` new ones."""
        window = self.spec.window_tokens
        before = self.offset - self.first_seen()
        if n == 1 and (window_size is None or window_size >= window):
            return None
        if before + n <= window and window_size in (None, window) and not return_array:
            return "causal"
        return create_causal_mask(n, before, window_size=window_size or window)


class ChunkLayer(WindowLayer):
    """A layer whose tokens see back to the start of their own chunk of `window_tokens` only."""

    def first_seen(self) -> int:
        """Return the first position that the next token attends to."""
        return self.offset // self.spec.window_tokens * self.spec.window_tokens

    @property
    def start_position(self) -> int:
        """First position that is fetched, from which models count their own mask."""
        return self.first_seen()

    def maybe_trim_front(self) -> None:
        """Do nothing: what is no longer seen slides away elsewhere."""

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Build the mask over the tokens that are fetched for `n` new ones."""
        chunk = self.spec.window_tokens
        rows = mx.arange(self.offset, self.offset + n)[:, None]
        columns = mx.arange(self.first_seen(), self.offset + n)
        return (columns <= rows) & (columns // chunk == rows // chunk)
