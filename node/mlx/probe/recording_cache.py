"""Cache at any position that records a layer's values and returns zeros."""

from typing import Any

import mlx.core as mx


class RecordingCache:
    """Stand-in for one layer's cache at a chosen position.

    Attention gets zeros back, so its result is zero at every position: no layer's input depends
    on the position, in any precision, and what a layer stores differs by its own doing alone.
    """

    def __init__(self, upstream: Any, position: int) -> None:
        self._upstream = upstream  # for attributes that only its class has, such as a window's size
        self.offset = position
        self.start_position = position  # of a chunked cache: nothing before is held
        self.keys: mx.array | None = None  # a model may set these two later, as an indexer does
        self.values: mx.array | None = None
        self.writes_count = 0
        self._shown: tuple[mx.array, mx.array] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upstream, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Record `[rows, heads, tokens, width]`; return zeros of these shapes."""
        self.keys, self.values = keys, values
        self.offset += keys.shape[2]
        self.writes_count += 1
        self._shown = (mx.zeros_like(keys), mx.zeros_like(values))
        return self._shown

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the zeros of its own layer to layers that share this cache."""
        assert self._shown is not None, "read before it was written"
        return self._shown

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return no mask: one token sees itself."""
        assert n == 1, "the recording shows one token per row"
