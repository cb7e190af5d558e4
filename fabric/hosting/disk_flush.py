"""Flushes of files and folders to the drive, on macOS and on Linux.

Errors are the system's OSError.
"""

import errno
import fcntl
import os
import sys
from typing import Final

# Values from macOS's <sys/fcntl.h>; Python knows the first there, the second not everywhere.
FULL_FLUSH: Final[int] = getattr(fcntl, "F_FULLFSYNC", 51)
BARRIER: Final[int] = getattr(fcntl, "F_BARRIERFSYNC", 85)
_UNSUPPORTED: Final = frozenset({errno.ENOTSUP, errno.EINVAL, errno.ENOTTY})


def flush_commands(durability: str, platform: str) -> tuple[int, ...]:
    """List the fcntl commands to try before fsync.

    On macOS fsync only hands data to the drive, whose cache loses power.
    """
    if platform != "darwin":
        return ()
    return (FULL_FLUSH,) if durability == "full" else (BARRIER, FULL_FLUSH)


def flush(descriptor: int, durability: str, platform: str = sys.platform) -> None:
    """Make a file or directory durable to the degree of `durability`."""
    if durability == "none":
        return
    for command in flush_commands(durability, platform):
        try:
            fcntl.fcntl(descriptor, command)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:  # a network or FAT volume; a failure is final
                raise
        else:
            return
    os.fsync(descriptor)
