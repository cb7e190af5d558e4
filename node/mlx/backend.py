"""Differences between MLX's backends: its CPU code, Metal, and CUDA.

All code that depends on the backend uses this module; `device.py` has the calls that check a
device's memory and errors.

On the CPU, weights are stored by columns: the BLAS in MLX's CPU wheels multiplies by the transpose
of such an array two to four times as fast as by that of a row-major one (`x @ w.T`, 256 rows of 144
by 1,900 of 144: 5.1 GFLOPS instead of 1.9). It adds in the same order, so no bit changes. Adding a
bias would change the order, so layers with a bias keep their layout, as do GPU arrays and 16-bit
numbers.
"""

import sys
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx
from mlx import nn

from node.limits import PREFILL_CHUNK_TOKENS_MAX, PREFILL_CHUNK_TOKENS_MIN

CPU_PADDED_TOKENS_MAX: Final = 4_096  # above it, padding costs more than one call saves


@dataclass(frozen=True, slots=True)
class Backend:
    """Properties of a backend of MLX."""

    name: str  # part of a model's fingerprint: backends round differently
    is_gpu: bool
    # The CPU's may fall behind by a few operations only, then a launch blocks.
    launch_waits: bool
    # Without a fused kernel the masked half of the scores is computed as well: on CPU 2,000 tokens
    # in chunks of 512 took 0.6x the time of one chunk.
    chunk_tokens_max: int
    padded_tokens_max: int  # fetched together by sequences padded to one length
    fused_widths: frozenset[int]  # head widths for which a prompt's scores are not stored
    # For the BLAS in MLX's CPU wheels, see the module's docstring.
    stores_by_columns: bool


CPU: Final = Backend(
    name=f"cpu-{sys.platform}",
    is_gpu=False,
    launch_waits=True,
    chunk_tokens_max=PREFILL_CHUNK_TOKENS_MIN,
    padded_tokens_max=CPU_PADDED_TOKENS_MAX,
    fused_widths=frozenset(),
    stores_by_columns=True,
)
# Source of the widths: MLX 0.32.4, `mlx/backend/metal/scaled_dot_product_attention.cpp`.
METAL: Final = Backend(
    name="metal",
    is_gpu=True,
    launch_waits=False,
    chunk_tokens_max=PREFILL_CHUNK_TOKENS_MAX,
    padded_tokens_max=sys.maxsize,
    fused_widths=frozenset({64, 80, 128}),
    stores_by_columns=False,
)
# Not tried yet: scores of every width are taken to be kept, which only makes chunks shorter.
CUDA: Final = replace(METAL, name="cuda", fused_widths=frozenset())


def current() -> Backend:
    """Return the backend that models compute on."""
    if mx.default_device().type == mx.cpu:
        return CPU
    return METAL if mx.metal.is_available() else CUDA


def stored_by_columns(array: mx.array) -> mx.array:
    """Return an equal array whose last two axes are stored column by column, on the CPU."""
    if array.dtype != mx.float32 or not current().stores_by_columns:
        return array
    return mx.contiguous(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def store_weights_by_columns(model: nn.Module) -> None:
    """Replace the weights of linear layers that add no bias, and of embeddings."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and "bias" not in module:
            module.weight = stored_by_columns(module.weight)
            mx.eval(module.weight)
