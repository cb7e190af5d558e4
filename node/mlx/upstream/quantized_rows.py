"""Quantized keys and values of some sequences of one layer, and how attention gets them.

Attention code in mlx-lm asks `hasattr(cache, "bits")` after each fetch: with `bits` it gets
packed triples, without it arrays. So every fetch decides anew: packed triples for a few
queries, dequantized arrays for many, for which the fused kernel is several times faster.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from node.mlx.resident_layer import PACKED_QUERIES_MAX
from node.mlx.token_store import round_up

Triple = tuple[mx.array, mx.array, mx.array]
Format = tuple[Any, ...]


class QuantizedRows:
    """Arrays `[rows, kv_heads, capacity, width]` of which the first `end` columns are in use.

    `keys` and `values` are triples of codes, scales and biases, or None before the first
    token. They are assigned whole and never shared between two caches.
    """

    def __init__(self, group_size: int = 64, bits: int = 4, *, dequantized: bool = False) -> None:
        """Hold no token yet.

        Args:
            group_size: Values that share one scale.
            bits: Bits per value.
            dequantized: Fetch arrays always, for attention that cannot take packed triples.
        """
        self.keys: Triple | None = None
        self.values: Triple | None = None
        self.end = 0
        self.group_size = group_size
        self.dequantized = dequantized
        self._bits = bits
        self._packed = not dequantized

    @property
    def bits(self) -> int:
        """Bits per value; absent while fetched keys and values are dequantized."""
        if not self._packed:
            raise AttributeError
        return self._bits

    @property
    def format(self) -> Format:
        """Everything that must agree before the codes of two caches may be joined."""
        return self._bits, self.group_size, self.dequantized

    @property
    def arrays_format(self) -> Format:
        """Heads, widths and types of the arrays."""
        arrays = (*(self.keys or ()), *(self.values or ()))
        return tuple((a.shape[1], a.shape[3], a.dtype) for a in arrays)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append `[rows, kv_heads, n, width]` and return all columns, packed or dequantized.

        Raises ValueError, and has changed nothing, if MLX cannot quantize the widths or the
        shapes are not those of the columns before.
        """
        key_parts, value_parts = self._quantize(keys), self._quantize(values)
        # Columns from `end` on count as free: a failure between here and its advance is harmless.
        new_keys = _written(self.keys, key_parts, self.end)
        new_values = _written(self.values, value_parts, self.end)
        self.keys, self.values = new_keys, new_values
        self.end += keys.shape[2]
        self._packed = not self.dequantized and keys.shape[2] <= PACKED_QUERIES_MAX
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return all columns as the last fetch did; layers that share this cache need it."""
        assert self.keys is not None, "nothing to fetch"
        assert self.values is not None, "values come with keys"
        keys, values = (
            tuple(a[:, :, : self.end] for a in triple) for triple in (self.keys, self.values)
        )
        if self._packed:
            return keys, values
        return self._dequantize(keys), self._dequantize(values)

    def _quantize(self, vectors: mx.array) -> Triple:
        return mx.quantize(vectors, group_size=self.group_size, bits=self._bits)

    def _dequantize(self, triple: Sequence[mx.array]) -> mx.array:
        return mx.dequantize(*triple, group_size=self.group_size, bits=self._bits)

    def is_trimmable(self) -> bool:
        """Say that any suffix may be dropped."""
        return True

    def size(self) -> int:
        return self.end

    def empty(self) -> bool:
        """Say whether no array was made yet."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, capacity included."""
        return sum(int(a.nbytes) for a in (*(self.keys or ()), *(self.values or ())))


def _written(arrays: Triple | None, parts: Triple, start: int) -> Triple:
    """Return the arrays with `parts` in the columns from `start` on, grown where needed."""
    end = start + parts[0].shape[2]
    if arrays is None:
        arrays = _zeros(parts, parts[0].shape[0], round_up(end))
    for array, part in zip(arrays, parts, strict=True):
        # Without this, one row would be broadcast to all rows.
        if array.shape[:2] != part.shape[:2] or array.shape[3] != part.shape[3]:
            message = f"cannot append {part.shape} to {array.shape}"
            raise ValueError(message)
    rows, _, capacity, _ = arrays[0].shape
    if end > capacity:
        more = _zeros(arrays, rows, round_up(end) - capacity)
        codes, scales, biases = (
            mx.concatenate(pair, axis=2) for pair in zip(arrays, more, strict=True)
        )
        arrays = codes, scales, biases
    for array, part in zip(arrays, parts, strict=True):
        array[:, :, start:end] = part
    return arrays


def _zeros(like: Triple, rows: int, columns: int) -> Triple:
    codes, scales, biases = (
        mx.zeros((rows, a.shape[1], columns, a.shape[3]), a.dtype) for a in like
    )
    return codes, scales, biases


def stacked(sources: Sequence[tuple[Triple | None, int, int]], end: int) -> Triple:
    """Copy caches one under the other so that their last columns end together at `end`.

    Args:
        sources: Per cache its arrays, its rows and its columns in use; one is not empty.
        end: Columns in use of the result; room for one token more is allocated.
    """
    like = next(arrays for arrays, _, used in sources if arrays is not None and used)
    result = _zeros(like, sum(rows for _, rows, _ in sources), round_up(end + 1))
    first = 0
    for arrays, rows, used in sources:
        if arrays is not None and used:
            for target, array in zip(result, arrays, strict=True):
                target[first : first + rows, :, end - used : end] = array[:, :, :used]
        first += rows
    return result
