"""One layer's 4-bit key-value cache of one sequence, as mlx-lm's models expect a cache.

Attention sees the 4-bit values from the first token on, so a cache read back from disk is
the same cache. Packed triples go to decode-shaped calls; prefill gets dequantized arrays,
for which MLX has a fused kernel (7x faster at 256 queries on CPU, 2.7x on an M5 Max).
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from fabric.cache_spec import LayerSpec
from node.mlx.packed_store import PackedStore, Triple

PACKED_QUERIES_MAX = 16


class ResidentLayer:
    """Resident cache of one layer; `offset` tokens are valid, the rest is capacity."""

    def __init__(self, spec: LayerSpec, capacity_tokens: int) -> None:
        self.spec = spec
        self.group_size = spec.group_size
        self.offset = 0
        self._packed = True
        heads = spec.kv_heads
        self._key_heads = slice(0, heads)
        if spec.key_width == spec.value_width:
            self._value_heads = slice(heads, 2 * heads)
            both = PackedStore(spec, 2 * heads, spec.key_width, capacity_tokens)
            self._stores = (both, both)
        else:
            self._value_heads = slice(0, heads)
            self._stores = (
                PackedStore(spec, heads, spec.key_width, capacity_tokens),
                PackedStore(spec, heads, spec.value_width, capacity_tokens),
            )

    @property
    def bits(self) -> int:
        """Bits per value; absent while the last fetch was dequantized.

        mlx-lm chooses its attention kernel by `hasattr(cache, "bits")` after the fetch.
        """
        if not self._packed:
            raise AttributeError
        return self.spec.bits

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit without growing."""
        return self._stores[0].capacity_tokens

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate so that the cache may cross a step."""
        return [array for store in dict.fromkeys(self._stores) for array in store.arrays]

    def slots(self) -> Iterator[tuple[mx.array, slice]]:
        """Yield keys' and values' arrays with their heads, in block-file order."""
        for store, heads in zip(self._stores, (self._key_heads, self._value_heads), strict=True):
            for array in store.arrays:
                yield array, heads

    def reserve(self, tokens_count: int) -> None:
        """Make room for `tokens_count` tokens in total."""
        for store in self._stores:
            store.reserve(tokens_count)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append `[1, kv_heads, n, width]` and return all tokens, packed or dequantized."""
        count = keys.shape[2]
        end = self.offset + count
        self.reserve(end)
        key_store, value_store = self._stores
        if key_store is value_store:
            key_store.write(mx.concatenate([keys, values], axis=1), self.offset)
        else:
            key_store.write(keys, self.offset)
            value_store.write(values, self.offset)
        self.offset = end
        self._packed = count <= PACKED_QUERIES_MAX
        packed_keys = key_store.fetch(self._key_heads, end)
        packed_values = value_store.fetch(self._value_heads, end)
        if self._packed:
            return packed_keys, packed_values
        return self._dequantize(packed_keys), self._dequantize(packed_values)

    def _dequantize(self, triple: Triple) -> mx.array:
        return mx.dequantize(*triple, group_size=self.group_size, bits=self.spec.bits)

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Build the attention mask for `n` new tokens as mlx-lm's caches do."""
        if window_size is not None:
            return create_causal_mask(n, self.offset, window_size=window_size)
        if n == 1:
            return None
        return create_causal_mask(n, self.offset) if return_array else "causal"

    def trim(self, tokens_count: int) -> int:
        """Forget the last tokens; their bytes stay and are overwritten later."""
        count = min(self.offset, tokens_count)
        self.offset -= count
        return count

    def is_trimmable(self) -> bool:
        """Say that any suffix may be dropped."""
        return True

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Say whether no token is held."""
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, capacity included."""
        return sum(int(array.nbytes) for array in self.state)
