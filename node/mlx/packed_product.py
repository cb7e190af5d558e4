"""Products and weights of attention to quantized vectors, in the forms fastest on this machine.

    folded     the query heads of a key head are rows of one product with packed vectors
    apart      one such product for each row: for the GPUs that starve on few rows (`form_trial`)
    unpacked   on the CPU, codes of 4 bits become numbers, scaled within the product

MLX's CPU code unpacks keys again for each row of a packed product. Unpacked, the low and the high
halves of all bytes are two arrays, so a product is the sum of two of half the width. A part of the
tokens at a time stays in the processor's cache: of 65,536 tokens, that is three times as fast.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import mlx.core as mx

from node.mlx.token_store import Packed

UNPACKED_BITS: Final = 4
UNPACKED_NUMBERS: Final = 1 << 18  # codes unpacked at once: about 1 MiB, a core's own cache
FORM_TOKENS_MIN: Final = 512  # below it, more operations cost more than they save
# The fewest rows for which unpacking once is faster than unpacking for each row.
SLOW_KEY_ROWS_MIN: Final = 4  # without a fast product of plain arrays
FAST_VALUE_ROWS_MIN: Final = 2
# Query tokens of a sequence up to which attention computes on packed vectors.
PACKED_QUERIES_MAX: Final = 16
_LOW_HALVES: Final = 0x0F0F0F0F


class ValuesForm(StrEnum):
    """Form of the product of weights and values."""

    FOLDED = "folded"
    APART = "apart"
    UNPACKED = "unpacked"


@dataclass(frozen=True, slots=True)
class Forms:
    """Forms of attention's products and of its softmax."""

    values: ValuesForm = ValuesForm.FOLDED
    unpacked_key_rows_min: int | None = None  # keys are unpacked for so many rows; None: never
    softmax_by_powers: bool = False

    def computes_blocks(self, queries_count: int, tokens_count: int) -> bool:
        """Return whether so many queries attend to one block of tokens after another."""
        are_many = queries_count > PACKED_QUERIES_MAX and tokens_count >= FORM_TOKENS_MIN
        return self.softmax_by_powers and are_many

    def stays_packed(self, queries_count: int, tokens_count: int) -> bool:
        """Return whether so many queries attend to packed tokens.

        Else the tokens are dequantized all at once, for plain attention.
        """
        is_product = queries_count <= PACKED_QUERIES_MAX
        return is_product or self.computes_blocks(queries_count, tokens_count)


PACKED: Final = Forms()
_chosen = threading.local()  # per engine thread: tests run several in one process


def use_forms(forms: Forms) -> None:
    """Set the forms of this thread's attention."""
    _chosen.forms = forms


def chosen_forms() -> Forms:
    """Return the forms of this thread's attention; packed ones by default."""
    forms: Forms = getattr(_chosen, "forms", PACKED)
    return forms


def keys_product(queries: mx.array, keys: Packed, forms: Forms) -> mx.array:
    """Multiply `[batch, kv_heads, rows, width]`; return `[batch, kv_heads, rows, tokens]`."""
    rows_min = forms.unpacked_key_rows_min
    if rows_min is not None and queries.shape[2] >= rows_min and _can_unpack(queries, keys):
        return _unpacked_keys_product(queries, keys)
    return mx.quantized_matmul(queries, *keys[:3], transpose=True, **keys.quantization)


def softmax(scores: mx.array, forms: Forms) -> mx.array:
    """Return the softmax over the last axis."""
    if (
        not forms.softmax_by_powers
        or scores.dtype != mx.float32
        or scores.shape[-1] < FORM_TOKENS_MIN
    ):
        return mx.softmax(scores, axis=-1, precise=True)
    powers = mx.power(math.e, scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def values_product(weights: mx.array, values: Packed, form: ValuesForm) -> mx.array:
    """Multiply `[batch, kv_heads, rows, tokens]`; return `[batch, kv_heads, rows, width]`."""
    is_unpacked = form is ValuesForm.UNPACKED and weights.shape[2] >= FAST_VALUE_ROWS_MIN
    if is_unpacked and _can_unpack(weights, values):
        return _unpacked_values_product(weights, values)
    bits = values.quantization
    if form is ValuesForm.APART:
        apart = (array[:, :, None] for array in values[:3])
        out = mx.quantized_matmul(weights[..., None, :], *apart, transpose=False, **bits)
        return out.squeeze(-2)
    return mx.quantized_matmul(weights, *values[:3], transpose=False, **bits)


def _can_unpack(factor: mx.array, packed: Packed) -> bool:
    is_alike = packed.bits == UNPACKED_BITS and factor.dtype == packed.scales.dtype == mx.float32
    return is_alike and packed.codes.shape[2] >= FORM_TOKENS_MIN


def _unpacked_keys_product(queries: mx.array, keys: Packed) -> mx.array:
    """Multiply with `codes * scales + biases`, and scale after the product if that is cheaper."""
    groups = keys.scales.shape[-1]
    even, odd = queries[..., 0::2], queries[..., 1::2]
    parts = [
        even @ low.swapaxes(-1, -2) + odd @ high.swapaxes(-1, -2)
        for _, low, high in _unpacked_parts(keys)
    ]
    products = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    if groups == 1:
        products = products * keys.scales.swapaxes(-1, -2)
    sums = queries.reshape(*queries.shape[:-1], groups, -1).sum(axis=-1)
    return products + sums @ keys.biases.swapaxes(-1, -2)


def _unpacked_values_product(weights: mx.array, values: Packed) -> mx.array:
    groups = values.scales.shape[-1]
    scaled = weights * values.scales.swapaxes(-1, -2) if groups == 1 else weights
    products = [
        (scaled[..., part] @ low, scaled[..., part] @ high)
        for part, low, high in _unpacked_parts(values)
    ]
    even, odd = (sum(halves[1:], halves[0]) for halves in zip(*products, strict=True))
    sums = mx.stack([even, odd], axis=-1)
    lead, biases = weights.shape[:-1], weights @ values.biases
    return (sums.reshape(*lead, groups, -1) + biases[..., None]).reshape(*lead, -1)


def _unpacked_parts(packed: Packed) -> Iterator[tuple[slice, mx.array, mx.array]]:
    """Yield parts of the tokens with the even and the odd numbers of their vectors.

    Numbers are scaled where a vector has several scales, else they are the codes.
    """
    codes, tokens_count = packed.codes, packed.codes.shape[2]
    token_numbers = codes.shape[0] * codes.shape[1] * packed.scales.shape[-1] * packed.group_size
    parts_count = max(1, round(tokens_count * token_numbers / UNPACKED_NUMBERS))
    part_tokens = -(-tokens_count // parts_count)  # equal parts: a short one costs as much
    for start in range(0, tokens_count, part_tokens):
        part = slice(start, min(tokens_count, start + part_tokens))
        words = codes[:, :, part]
        low = (words & _LOW_HALVES).view(mx.uint8).astype(mx.float32)
        high = ((words >> 4) & _LOW_HALVES).view(mx.uint8).astype(mx.float32)
        scales = packed.scales[:, :, part]
        yield part, _scaled(low, scales), _scaled(high, scales)


def _scaled(numbers: mx.array, scales: mx.array) -> mx.array:
    """Multiply numbers by the scales of their groups, if there are several."""
    groups = scales.shape[-1]
    if groups == 1:
        return numbers
    lead = numbers.shape[:-1]
    return (numbers.reshape(*lead, groups, -1) * scales[..., None]).reshape(*lead, -1)
