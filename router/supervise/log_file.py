"""Bounded log that a child process appends to: a log that is too long is moved to `NAME.1`.

The writer keeps its descriptor and appends, so the file is copied and truncated, not renamed.
Lines written in between are lost.
"""

import contextlib
import os
import shutil
from pathlib import Path

from router.limits import LOG_BYTES_MAX


def open_log(path: Path) -> int:
    """Open a log for appending, readable by its owner alone; return the descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def bound(path: Path, bytes_max: int = LOG_BYTES_MAX) -> bool:
    """Rotate a log that is longer than `bytes_max`; return whether it was."""
    try:
        size = path.stat().st_size
        if size <= bytes_max:
            return False
        older = path.with_name(f"{path.name}.1")
        older.unlink(missing_ok=True)
        with path.open("rb") as source, os.fdopen(open_log(older), "wb") as target:
            source.seek(size - bytes_max)
            shutil.copyfileobj(source, target)
    except OSError:
        pass  # a full disk: the old lines are lost then
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
    return True
