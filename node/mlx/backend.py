"""Differences between the backends of MLX: its CPU code, Metal, and CUDA.

All code that depends on the backend uses this module. `device.py` has the calls that watch a
device's memory and errors.
"""

import sys
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

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
    fused_widths: frozenset[int]  # of heads whose scores of a prompt are not kept
    # For the BLAS of the CPU's wheels, see `column_layout`.
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
