"""The limit of open files: high enough for all connections, and kept so by imports."""

import contextlib
import resource
from collections.abc import Iterator
from typing import Final

OPEN_FILES: Final = 10_240  # connections of HTTP and transfers, and block files


def raise_limit() -> None:
    """Raise the soft limit as far as needed and allowed; macOS starts with 256.

    macOS refuses what is over `kern.maxfilesperproc`, which is less than its hard limit says.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            wanted //= 2
        else:
            return


@contextlib.contextmanager
def limits_kept() -> Iterator[None]:
    """Ignore calls that change the process's limits, as libraries make them at import.

    Restoring afterwards is not enough: only root may raise a hard limit again.
    """
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original
