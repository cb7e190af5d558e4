"""Settings of a whole process: its limit of open files, and short pauses for housekeeping."""

import contextlib
import gc
import resource
import sys
from collections.abc import Iterator
from typing import Final

OPEN_FILES: Final = 10_240  # connections of HTTP and transfers, and block files
SWITCH_S: Final = 0.001  # Python's default of 5 ms delays a token while another thread computes


def raise_open_files_limit() -> None:
    """Raise the soft limit as far as needed and allowed; macOS starts with 256.

    macOS refuses more than `kern.maxfilesperproc`, which is below the hard limit it reports.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    while soft != resource.RLIM_INFINITY and soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):
            target //= 2
        else:
            return


@contextlib.contextmanager
def keep_resource_limits() -> Iterator[None]:
    """Ignore calls that change the process's limits, as some libraries make at import.

    Restoring afterwards is not enough: only root may raise a hard limit again.
    """
    original = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = original


def keep_pauses_short() -> None:
    """Exclude all present objects from later garbage collections; call once the process is ready.

    Modules and a tokenizer's tables live as long as the process, yet each full collection walked
    them: 50-110 ms in the router, in the middle of an answer.
    """
    gc.collect()
    exclude_from_collections()
    sys.setswitchinterval(SWITCH_S)


def exclude_from_collections() -> None:
    """Exclude all present objects from later garbage collections.

    Those in no cycle are still freed. Call it rarely: garbage in cycles is never freed then.
    """
    gc.freeze()
