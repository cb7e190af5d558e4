"""Quantized caches that mlx-lm's own BatchGenerator takes; mlx-lm has none itself.

Rows of a batch end in the same column: shorter ones have padding on the left, which the mask
hides. Joining and splitting batches moves codes and never quantizes again, so a sequence
leaves a batch with the bits it would have alone.

Quantized keys and values of some sequences of one layer, and how attention gets them.

Attention code in mlx-lm asks `hasattr(cache, "bits")` after each fetch: with `bits` it gets
packed triples, without it arrays. So every fetch decides anew: packed triples for a few
queries, dequantized arrays for many, for which the fused kernel is several times faster.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask, dynamic_roll

from node.mlx.packed_product import PACKED_QUERIES_MAX
from node.mlx.token_store import round_up

Triple = tuple[mx.array, mx.array, mx.array]
Format = tuple[Any, ...]


class QuantizedRows:
    """Arrays `[rows, kv_heads, capacity, width]` of which the first `end` columns are in use.

    `keys` and `values` are triples of codes, scales and biases, or None before the first
    token. They are assigned whole and never shared between two caches.
    """

    def __init__(self, group_size: int = 64, bits: int = 4, *, dequantized: bool = False) -> None:
        """Create an empty cache.

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
        """Everything that must be equal in two caches before their codes may be joined."""
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
        new_keys = _write_parts(self.keys, key_parts, self.end)
        new_values = _write_parts(self.values, value_parts, self.end)
        self.keys, self.values = new_keys, new_values
        self.end += keys.shape[2]
        self._packed = not self.dequantized and keys.shape[2] <= PACKED_QUERIES_MAX
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the columns of the last fetch again, for layers that share this cache."""
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
        """Return True, since any suffix may be dropped."""
        return True

    def size(self) -> int:
        return self.end

    def empty(self) -> bool:
        """Return whether no array was created yet."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, capacity included."""
        return sum(int(a.nbytes) for a in (*(self.keys or ()), *(self.values or ())))


def _write_parts(arrays: Triple | None, parts: Triple, start: int) -> Triple:
    """Write `parts` into the arrays from token `start` on, and grow the arrays if necessary."""
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
    """Stack copies of caches as rows, aligned so that their last columns end at `end`.

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


class MergeableQuantizedKVCache(QuantizedRows):
    """One sequence's quantized keys and values of one layer; many merge into a batch."""

    @property
    def offset(self) -> int:
        return self.end

    @offset.setter
    def offset(self, tokens_count: int) -> None:
        self.end = tokens_count

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that `from_state` needs, including the arrays that mlx-lm evaluates."""
        return self.keys, self.values, self.end, self.group_size, self._bits, self.dequantized

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> Self:
        """Create a cache from the `state` of another; both then grow independently."""
        keys, values, end, group_size, bits, dequantized = state
        cache = cls(group_size, bits, dequantized=dequantized)
        cache.keys, cache.values, cache.end = _unshare(keys), _unshare(values), end
        return cache

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        return create_attention_mask(n, self.end, return_array, window_size)

    def trim(self, tokens_count: int) -> int:
        """Drop the last `n` tokens; return how many were dropped."""
        count = min(self.end, tokens_count)
        self.end -= count
        return count

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> "BatchQuantizedKVCache":
        """Copy caches of one layer into a batch; raise ValueError if their formats differ."""
        return BatchQuantizedKVCache.merge(caches)


class BatchQuantizedKVCache(QuantizedRows):
    """Quantized keys and values of one layer of several sequences, padded on the left."""

    def __init__(
        self,
        left_padding: Sequence[int],
        group_size: int = 64,
        bits: int = 4,
        *,
        dequantized: bool = False,
    ) -> None:
        """Create an empty cache of `len(left_padding)` sequences.

        Args:
            left_padding: Leading columns per row that are not tokens of its sequence.
            group_size: Values that share one scale.
            bits: Bits per value.
            dequantized: Fetch arrays always, for attention that cannot take packed triples.
        """
        super().__init__(group_size, bits, dequantized=dequantized)
        self.padding = list(left_padding)
        self._right_padding: list[int] | None = None

    @property
    def left_padding(self) -> mx.array:
        """Leading columns per row that are not tokens, `[rows]`."""
        return mx.array(self.padding, mx.int32)

    @property
    def offset(self) -> mx.array:
        """Position of the next token per row, `[rows]`; negative if it is padding."""
        return mx.array([self.end - padding for padding in self.padding], mx.int32)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything that `from_state` needs, including the arrays that mlx-lm evaluates."""
        arrays = (self.keys, self.values, self.left_padding, self.end)
        return *arrays, self.group_size, self._bits, self.dequantized

    @classmethod
    def from_state(cls, state: tuple[Any, ...]) -> Self:
        """Create a batch from the `state` of another; both then grow independently."""
        keys, values, left_padding, end, group_size, bits, dequantized = state
        batch = cls(left_padding.tolist(), group_size, bits, dequantized=dequantized)
        batch.keys, batch.values, batch.end = _unshare(keys), _unshare(values), end
        return batch

    def make_mask(
        self, n: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Build the attention mask for `n` new columns, `[rows, 1, n, columns]` if any is padded.

        The axis of length 1 matters: quantized attention puts the repeats of each head after
        it, and a mask without it would be taken for one per head.
        """
        if not any(self.padding):
            return create_attention_mask(n, self.end, return_array, window_size)
        return create_causal_mask(
            n, self.end, window_size=window_size, left_padding=self.left_padding
        )

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Set the padding of the next tokens; `finalize` moves right padding to the left.

        Raises ValueError for left padding after tokens.
        """
        if left_padding is not None:
            if self.keys is not None:
                message = "left padding goes before the first token"
                raise ValueError(message)
            self.padding = [a + b for a, b in zip(self.padding, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = list(right_padding)

    def finalize(self) -> None:
        """Rotate rows that end with padding, so that the padding is on their left."""
        announced, self._right_padding = self._right_padding, None
        if announced is None or self.keys is None or self.values is None:
            return
        # Unused capacity rotates along: what passes the last column is free space again.
        shifts = mx.array(announced)[:, None]
        self.keys = _each(self.keys, lambda a: dynamic_roll(a, shifts, axis=2))
        self.values = _each(self.values, lambda a: dynamic_roll(a, shifts, axis=2))
        self.padding = [a + b for a, b in zip(self.padding, announced, strict=True)]

    def trim(self, tokens_count: int) -> int:
        """Drop the last columns of all rows; shorter rows become empty. Return how many."""
        count = min(self.end, tokens_count)
        self.end -= count
        if count:
            self.padding = [min(padding, self.end) for padding in self.padding]
        return count

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep the given rows, in the given order, and drop columns that none of them uses."""
        indices = [int(index) for index in batch_indices]
        padding = [self.padding[index] for index in indices]
        unused = min(self.end, *padding) if padding else self.end
        same = indices == list(range(len(self.padding)))
        if self.keys is None or self.values is None or unused == self.end:
            self.keys = self.values = None
        elif unused or not same:
            rows = slice(None) if same else mx.array(indices, mx.int32)
            self.keys = _each(self.keys, lambda a: a[:, :, unused:][rows])
            self.values = _each(self.values, lambda a: a[:, :, unused:][rows])
        self.padding = [columns - unused for columns in padding]
        self.end -= unused

    def extend(self, other: "BatchQuantizedKVCache") -> None:
        """Append a copy of another batch's rows; raise ValueError if the formats differ."""
        _check_joinable([self, other])
        self._stack([(self, self.padding), (other, other.padding)])

    def extract(self, index: int) -> MergeableQuantizedKVCache:
        """Copy one row into a separate cache."""
        cache = MergeableQuantizedKVCache(self.group_size, self._bits, dequantized=self.dequantized)
        start = self.padding[index]
        if self.keys is None or self.values is None or start >= self.end:
            return cache
        row, columns = slice(index, index + 1), slice(start, self.end)
        cache.keys = _each(self.keys, lambda a: mx.contiguous(a[row, :, columns]))
        cache.values = _each(self.values, lambda a: mx.contiguous(a[row, :, columns]))
        cache.end = self.end - start
        return cache

    @classmethod
    def merge(cls, caches: Sequence[MergeableQuantizedKVCache]) -> Self:
        """Copy single caches of one layer into a batch; raise ValueError if formats differ."""
        _check_joinable(caches)
        bits, group_size, dequantized = caches[0].format
        batch = cls([], group_size, bits, dequantized=dequantized)
        batch._stack([(cache, [0]) for cache in caches])
        return batch

    def _stack(self, sources: Sequence[tuple[QuantizedRows, list[int]]]) -> None:
        """Replace the arrays by copies of other caches' rows with their padding."""
        end = max(cache.end for cache, _ in sources)
        keys = values = None
        if end:
            keys = stacked([(cache.keys, len(rows), cache.end) for cache, rows in sources], end)
            values = stacked([(cache.values, len(rows), cache.end) for cache, rows in sources], end)
        self.padding = [end - cache.end + columns for cache, rows in sources for columns in rows]
        self.keys, self.values, self.end = keys, values, end


def _check_joinable(caches: Sequence[Any]) -> None:
    kinds = {type(cache).__name__ for cache in caches}
    if not all(isinstance(cache, QuantizedRows) for cache in caches):
        message = f"cannot join {', '.join(sorted(kinds))}"
        raise ValueError(message)
    formats = {cache.format for cache in caches}
    formats_of_arrays = {cache.arrays_format for cache in caches if cache.end}
    if len(formats) != 1 or len(formats_of_arrays) > 1:
        message = f"cannot join quantized caches of {formats} {formats_of_arrays}"
        raise ValueError(message)


def _each(arrays: Triple, change: Callable[[mx.array], mx.array]) -> Triple:
    codes, scales, biases = (change(array) for array in arrays)
    return codes, scales, biases


def _unshare(arrays: Triple | None) -> Triple | None:
    """Wrap arrays again, since appending changes a wrapper that another cache shares."""
    return arrays and _each(arrays, lambda a: a[...])
