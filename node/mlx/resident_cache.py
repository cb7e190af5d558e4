"""All layers of one sequence, and their exact bytes in and out without a staging copy.

The bytes of tokens `a:b` in a layer's array are one run per head, `[kv_heads, b-a, row]`.
Blocks keep that order, so a block is read by one scatter read to its final place.
Memoryviews must be gone before the next step: a live one would force MLX to copy.
"""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from fabric.cache_spec import ModelCacheSpec
from node.mlx.resident_layer import ResidentLayer


class ResidentCache:
    """A sequence's cache in memory; only the engine thread computes with it."""

    def __init__(self, spec: ModelCacheSpec, capacity_tokens: int) -> None:
        self.spec = spec
        self.layers = [ResidentLayer(layer, capacity_tokens) for layer in spec.layers]
        self.settle()

    @property
    def tokens_count(self) -> int:
        """Tokens held."""
        return self.layers[0].offset

    @property
    def size_bytes(self) -> int:
        """Memory held, capacity included."""
        return sum(layer.nbytes for layer in self.layers)

    def settle(self) -> None:
        """Evaluate all arrays, so that their memory may be read or written directly."""
        mx.eval([layer.state for layer in self.layers])

    def reserve(self, tokens_count: int) -> None:
        """Make room for `tokens_count` tokens in total."""
        for layer in self.layers:
            layer.reserve(tokens_count)

    def rewind(self, tokens_count: int) -> None:
        """Keep the first `tokens_count` tokens; also undoes a step that failed half-way."""
        assert tokens_count <= self.tokens_count, "cannot rewind forwards"
        for layer in self.layers:
            layer.offset = tokens_count

    def assume(self, tokens_count: int) -> None:
        """Declare the first `tokens_count` tokens valid after their bytes were loaded."""
        for layer in self.layers:
            assert tokens_count <= layer.capacity_tokens, "more tokens than capacity"
            layer.offset = tokens_count

    def _rows(self) -> Iterator[tuple[memoryview, int, int, int]]:
        """Yield each array's heads as (bytes, kv_heads, capacity, bytes per token and head)."""
        for layer in self.layers:
            for array, heads in layer.slots():
                capacity = array.shape[2]
                view = memoryview(array).cast("B")
                head_bytes = len(view) // array.shape[1]
                part = view[heads.start * head_bytes : heads.stop * head_bytes]
                yield part, heads.stop - heads.start, capacity, head_bytes // capacity

    def scatter_views(self, start: int, end: int) -> list[memoryview]:
        """List writable views of tokens `start:end` in block-file order."""
        views = []
        for view, heads, capacity, row in self._rows():
            for head in range(heads):
                base = head * capacity
                views.append(view[(base + start) * row : (base + end) * row])
        return views

    def gather(self, start: int, end: int) -> memoryview:
        """Copy tokens `start:end` into one buffer in block-file order."""
        assert 0 <= start < end <= self.tokens_count, "gather only what is held"
        count = end - start
        out = np.empty(self.spec.kv_bytes(count), np.uint8)
        at = 0
        for view, heads, capacity, row in self._rows():
            size = heads * count * row
            source = np.frombuffer(view, np.uint8).reshape(heads, capacity, row)
            out[at : at + size].reshape(heads, count, row)[:] = source[:, start:end]
            at += size
        assert at == len(out), "the spec and the arrays disagree"
        return out.data
