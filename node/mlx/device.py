"""The device that MLX computes on: its memory, its errors, and NaN, which counts as one.

Metal keeps the error of a failed command buffer and raises it once, from whatever call encodes or
synchronizes next. Until then arrays of that buffer count as computed and hold arbitrary memory. So
an error invalidates everything computed since the last check that found none.
Source: MLX 0.32.4, `mlx/error.h`, `mlx/event.h`, `mlx/backend/metal/device.cpp`.

On the CPU, MLX frees nearly every array at once to the C library, which returns the pages of larger
ones to the system, to be mapped and cleared again for the next operation. glibc can keep them.
Source: mallopt(3) and malloc_trim(3).

NaN is checked before a prompt's or step's results are kept. A NaN in any layer stays in a token's
hidden state, so checking the last layer with a cache is enough; later layers store nothing.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from fabric.limits import MIB
from node.limits import STORED_ERRORS_MAX
from node.mlx import backend
from node.mlx.recurrent_layer import RecurrentLayer
from node.mlx.resident_layer import ResidentLayer

_C_LIBRARY: Final = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt; source: glibc 2.36, `malloc.h`
_MAPPED_BYTES_MIN: Final = 32 * MIB  # larger arrays are returned to the system as they are freed


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Capacity of a GPU."""

    working_set_bytes: int  # recommended by the system, or all memory of a discrete GPU
    buffers_max: int | None  # arrays of one process; None: unbounded


class DeviceError(Exception):
    """The device failed, or computed NaN or a token outside the vocabulary."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Convert MLX's errors of the device to DeviceError; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise DeviceError(str(error)) from error


def synchronize() -> None:
    """Wait for all launched work; raise DeviceError if any of it failed."""
    with device_errors():
        mx.synchronize()


def gpu_memory() -> GpuMemory | None:
    """Return the GPU's capacity, or None without one or if MLX does not report it."""
    if not backend.current().is_gpu:
        return None
    info = mx.device_info()
    size_bytes = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return GpuMemory(int(size_bytes), info.get("resource_limit")) if size_bytes else None


def limit_memory(share_bytes: int, pool_bytes: int) -> None:
    """Limit MLX's memory on a GPU, and the pool of freed memory; call it before a load.

    MLX's own bounds are 1.5 and 0.95 of the recommended working set, and a pooled buffer is
    reused for an array of about its size only; prompts need other sizes in each chunk. Source: MLX
    0.32.4, `mlx/backend/metal/allocator.cpp`. No memory is wired (`mx.set_wired_limit`): under
    concurrent turns and evictions that panicked macOS (ml-explore/mlx#3186).
    """
    if backend.current().is_gpu:
        mx.set_memory_limit(share_bytes)
        mx.set_cache_limit(pool_bytes)
    else:
        keep_freed_pages(pool_bytes)


def keep_freed_pages(pool_bytes: int) -> None:
    """Have the C library keep up to `pool_bytes` of freed pages; without glibc, do nothing."""
    if hasattr(_C_LIBRARY, "mallopt"):
        _C_LIBRARY.mallopt(_TRIM_THRESHOLD, pool_bytes)
        _C_LIBRARY.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)


def arrays_bytes() -> int:
    """Return the bytes of all arrays."""
    return int(mx.get_active_memory())


def pool_bytes() -> int:
    """Return the bytes of freed arrays that MLX keeps."""
    return int(mx.get_cache_memory())


def used_bytes() -> int:
    """Return the bytes of all arrays and of MLX's pool."""
    return arrays_bytes() + pool_bytes()


def return_unused() -> None:
    """Return freed arrays and pages to the system; raise DeviceError for a stored error."""
    synchronize()
    mx.clear_cache()
    if not backend.current().is_gpu and hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def clear() -> None:
    """Wait for running work, drop stored errors, and return unused memory.

    Raise DeviceError if the device keeps failing.
    """
    for left in reversed(range(STORED_ERRORS_MAX)):
        try:
            return_unused()
        except DeviceError:
            if not left:
                raise
        else:
            return


@contextmanager
def watch_nan(leaves: Iterable[Any]) -> Iterator[list[mx.array]]:
    """Collect whether values stored by the layers contain a NaN; nothing is evaluated yet."""
    flags: list[mx.array] = []
    storing = [leaf for leaf in leaves if isinstance(leaf, ResidentLayer) and leaf.spec.slots]
    recurrent = [leaf for leaf in leaves if isinstance(leaf, RecurrentLayer)]
    for leaf in storing[-1:]:
        leaf.appended_nan = flags
    try:
        yield flags
    finally:
        for leaf in storing[-1:]:
            leaf.appended_nan = None
    for layer in recurrent[-1:]:
        flags += [mx.isnan(array).any() for array in layer.cache if array is not None]


def refuse_nan(found: Iterable[mx.array], what: str) -> None:
    """Raise DeviceError if any flag in `found`, one per array with a NaN, is true."""
    if any(each.item() for each in found):
        message = f"{what} computed NaN"
        raise DeviceError(message)
