"""The device that MLX computes on, and the errors that are its own.

Metal keeps the error of a command buffer that failed and raises it once, from whatever is encoded
or synchronized next. Arrays of that buffer count as computed meanwhile and hold what happens to lie
in memory. So an error belongs to all that was computed since the last check that found none.
Source: MLX 0.32.4, `mlx/error.h`, `mlx/event.h`, `mlx/backend/metal/device.cpp`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from node.limits import STORED_ERRORS_MAX
from node.mlx import backend


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Capacity of a GPU."""

    working_set_bytes: int  # that the system recommends, or all of a GPU with memory of its own
    buffers_max: int | None  # arrays of one process; None: unbounded


class DeviceError(Exception):
    """The device failed, or computed NaN or a token outside the vocabulary."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceError for what MLX raises while it computes; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise DeviceError(str(error)) from error


def synchronize() -> None:
    """Wait for all that was launched; raise DeviceError if any of it failed."""
    with device_errors():
        mx.synchronize()


def gpu_memory() -> GpuMemory | None:
    """Return what the GPU can hold; None without one, or where MLX does not say."""
    if not backend.current().is_gpu:
        return None
    info = mx.device_info()
    size_bytes = info.get("max_recommended_working_set_size") or info.get("total_memory")
    return GpuMemory(int(size_bytes), info.get("resource_limit")) if size_bytes else None


def limit_memory(share_bytes: int, pool_bytes: int) -> None:
    """Bound what MLX takes of a GPU, and what it keeps of that; call it before a load.

    MLX's own bounds are 1.5 and 0.95 of the recommended working set, and a kept buffer is taken
    again for an array of about its size only; prompts need other sizes in each chunk. Source: MLX
    0.32.4, `mlx/backend/metal/allocator.cpp`. No memory is wired (`mx.set_wired_limit`): under
    concurrent turns and evictions that panicked macOS (ml-explore/mlx#3186).
    """
    if backend.current().is_gpu:
        mx.set_memory_limit(share_bytes)
        mx.set_cache_limit(pool_bytes)


def used_bytes() -> int:
    """Return the bytes of all arrays, and of what MLX keeps of freed ones."""
    return int(mx.get_active_memory() + mx.get_cache_memory())


def return_unused() -> None:
    """Return what MLX keeps of freed arrays to the system; raise DeviceError for a stored error."""
    synchronize()
    mx.clear_cache()


def clear() -> None:
    """Wait for what still runs, drop stored errors, and return unused memory.

    Raise DeviceError where the device does nothing but fail.
    """
    for left in reversed(range(STORED_ERRORS_MAX)):
        try:
            return_unused()
        except DeviceError:
            if not left:
                raise
        else:
            return
