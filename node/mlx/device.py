"""The device that MLX computes on, and the errors that are its own.

Metal keeps the error of a command buffer that failed and raises it once, from whatever is encoded
or synchronized next. Arrays of that buffer count as computed meanwhile and hold what happens to lie
in memory. So an error belongs to all that was computed since the last check that found none.
Source: MLX 0.32.4, `mlx/error.h`, `mlx/event.h`, `mlx/backend/metal/device.cpp`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from fabric.limits import DEVICE_POOL_BYTES, STORED_ERRORS_MAX


class DeviceError(Exception):
    """The device failed, or computed NaN or a token outside the vocabulary."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise DeviceError for what MLX raises while it computes; other errors pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise DeviceError(str(error)) from error


def check() -> None:
    """Raise DeviceError for a stored error of what is complete; do not wait for what still runs."""
    with device_errors():
        mx.async_eval(mx.array(0) + 1)


def synchronize() -> None:
    """Wait for all that was launched; raise DeviceError if any of it failed."""
    with device_errors():
        mx.synchronize()


def limit_pool() -> None:
    """Bound the unused memory that MLX keeps of a GPU's; to be called before a model is loaded.

    MLX bounds it by 0.95 of the recommended working set, and takes a kept buffer again for an array
    of about its size only; prompts need other sizes in each chunk. Source: MLX 0.32.4,
    `mlx/backend/metal/allocator.cpp`. No memory is wired (`mx.set_wired_limit`): under concurrent
    turns and evictions that panicked macOS (ml-explore/mlx#3186).
    """
    if is_gpu():
        mx.set_cache_limit(DEVICE_POOL_BYTES)


def return_unused() -> None:
    """Return what MLX keeps of freed arrays to the system; raise DeviceError for a stored error."""
    synchronize()
    mx.clear_cache()


def is_gpu() -> bool:
    """Say whether models run on a GPU: Apple's, or one by CUDA."""
    return bool(mx.default_device().type != mx.cpu)


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
