"""Growing arrays of one layer slot: vectors of some heads, appended token by token.

Packed stores hold 4- or 8-bit codes with scales and biases, plain ones the model's numbers.
All arrays are `[1, heads, capacity, width]`; positions count from the store's own start.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from fabric.kvcache.arrangement import Move, Range
from fabric.kvcache.cache_spec import NATIVE, WORD_BITS, SlotSpec
from node.mlx.rotate import MovedRows

GROWTH_TOKENS = 256
DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "I64": mx.int64,  # states of n-gram models: the last token ids
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Packed(NamedTuple):
    """Quantized vectors `[1, heads, tokens, width]` for attention."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int
    width: int  # without the zeros that fill the last group
    moved_rows: MovedRows | None = None  # rotation of moved rows, whose codes are unrotated

    @property
    def quantization(self) -> dict[str, int]:
        """Arguments of MLX's products that describe the codes."""
        return {"group_size": self.group_size, "bits": self.bits}

    def dense(self) -> mx.array:
        """Return the dequantized numbers, rotated to their positions."""
        numbers = mx.dequantize(*self[:3], **self.quantization)
        if numbers.shape[-1] != self.width:
            numbers = numbers[..., : self.width]
        return numbers if self.moved_rows is None else self.moved_rows.rotate_rows(numbers)

    def between(self, start: int, end: int) -> "Packed":
        """Return tokens `start:end` as they are stored, without a rotation."""
        codes, scales, biases = (array[:, :, start:end] for array in self[:3])
        return Packed(codes, scales, biases, self.bits, self.group_size, self.width)


def round_up(tokens_count: int) -> int:
    """Round a capacity up to the growth step."""
    return -(-tokens_count // GROWTH_TOKENS) * GROWTH_TOKENS


class TokenStore:
    """Arrays that grow along their token axis."""

    def __init__(self, slot: SlotSpec, heads: int, capacity_tokens: int) -> None:
        self.slot = slot
        self._heads = heads
        self.arrays = self._zeros(round_up(capacity_tokens))

    def _zeros(self, tokens_count: int) -> tuple[mx.array, ...]:
        slot, lead = self.slot, (1, self._heads, tokens_count)
        dtype = DTYPES[slot.dtype]
        if slot.bits == NATIVE:
            return (mx.zeros((*lead, slot.width), dtype),)
        groups = slot.stored_width // slot.group_size
        return (
            mx.zeros((*lead, slot.stored_width * slot.bits // WORD_BITS), mx.uint32),
            mx.zeros((*lead, groups), dtype),
            mx.zeros((*lead, groups), dtype),
        )

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit without growing."""
        return int(self.arrays[0].shape[2])

    def reserve(self, tokens_count: int) -> None:
        """Make room for `tokens_count` tokens in total."""
        missing = round_up(tokens_count) - self.capacity_tokens
        if missing > 0 and not self.capacity_tokens:
            self.arrays = self._zeros(missing)
        elif missing > 0:
            pairs = zip(self.arrays, self._zeros(missing), strict=True)
            self.arrays = tuple(mx.concatenate(pair, axis=2) for pair in pairs)

    def keep(self, start: int, end: int, capacity_tokens: int) -> None:
        """Keep tokens `start:end` as the first ones, with room for `capacity_tokens`."""
        self.arrays = self._join_parts([self.cut(start, end)], end - start, capacity_tokens)

    def copy_from(self, other: "TokenStore", ranges: Sequence[Range]) -> None:
        """Copy these ranges of another store's tokens, without free capacity."""
        self.arrays = self._join_parts([other.cut(*each) for each in ranges], 0, 0)

    def append_store(self, start: int, end: int, other: "TokenStore", capacity_tokens: int) -> None:
        """Keep tokens `start:end` as the first ones, followed by all of another store."""
        parts = [self.cut(start, end), other.arrays]
        self.arrays = self._join_parts(parts, end - start + other.capacity_tokens, capacity_tokens)

    def cut(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Return the arrays of tokens `start:end`."""
        return tuple(array[:, :, start:end] for array in self.arrays)

    def _join_parts(
        self, parts: Sequence[tuple[mx.array, ...]], tokens_count: int, capacity_tokens: int
    ) -> tuple[mx.array, ...]:
        padding = self._zeros(max(0, round_up(capacity_tokens) - tokens_count))
        return tuple(mx.concatenate(each, axis=2) for each in zip(*parts, padding, strict=True))

    def rearrange(self, moves: Sequence[Move]) -> None:
        """Move tokens to their new positions, bit for bit; holes between them are undefined."""
        parts, at = [], 0
        for move in moves:
            parts.append(self._zeros(move.new_start - at))
            parts.append(tuple(array[:, :, move.start : move.end] for array in self.arrays))
            at = move.new_end
        parts.append(self._zeros(max(self.capacity_tokens, round_up(at)) - at))
        self.arrays = tuple(mx.concatenate(part, axis=2) for part in zip(*parts, strict=True))

    def encode(self, vectors: mx.array) -> tuple[mx.array, ...]:
        """Return vectors `[batch, heads, tokens, width]` as they are stored."""
        slot = self.slot
        if slot.bits == NATIVE:
            return (vectors,)
        padding = slot.stored_width - slot.width
        if padding:
            vectors = mx.pad(vectors, [(0, 0), (0, 0), (0, 0), (0, padding)])
        return tuple(mx.quantize(vectors, group_size=slot.group_size, bits=slot.bits))

    def write(self, encoded: Sequence[mx.array], start: int) -> None:
        """Write encoded vectors of one sequence from position `start` on."""
        for array, part in zip(self.arrays, encoded, strict=True):
            array[..., start : start + part.shape[2], :] = part

    def random(self, tokens_count: int, key: mx.array) -> mx.array:
        """Return random vectors `[1, heads, tokens, width]` of a realistic magnitude."""
        shape = (1, self._heads, tokens_count, self.slot.width)
        return mx.random.normal(shape, DTYPES[self.slot.dtype], key=key)

    def fetch(self, heads: slice, start: int, end: int) -> mx.array | Packed:
        """Return tokens `start:end` of some heads as they are stored."""
        parts = [array[:, heads, start:end] for array in self.arrays]
        if self.slot.bits == NATIVE:
            return parts[0]
        codes, scales, biases = parts
        slot = self.slot
        return Packed(codes, scales, biases, slot.bits, slot.group_size, slot.width)


def last_tokens(fetched: mx.array | Packed, count: int) -> mx.array | Packed:
    """Return the last `count` fetched tokens, or all if there are fewer."""
    if not isinstance(fetched, Packed):
        return fetched[:, :, -count:]
    tokens_count, moved_rows = fetched.codes.shape[2], fetched.moved_rows
    last = fetched.between(max(0, tokens_count - count), tokens_count)
    if moved_rows is None:
        return last
    return last._replace(moved_rows=moved_rows.last_rows(count, tokens_count))


def with_moved_rows(fetched: mx.array | Packed, moved_rows: MovedRows) -> mx.array | Packed:
    """Rotate fetched rows to their positions, or attach the rotation for attention."""
    if isinstance(fetched, Packed):
        return fetched._replace(moved_rows=moved_rows)
    return moved_rows.rotate_rows(fetched)


def dense(fetched: mx.array | Packed) -> mx.array:
    """Return fetched values as plain numbers."""
    return fetched.dense() if isinstance(fetched, Packed) else fetched
