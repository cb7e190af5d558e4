"""Errors that end a command with a message instead of a traceback."""

import errno

FAILED = 1
MISUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count

_REMEDIES = {
    errno.EACCES: "check its owner and mode",
    errno.EDQUOT: "free some space",
    errno.EMFILE: "`ulimit -n 65536` allows more",
    errno.ENOSPC: "free some space",
}


class CommandError(Exception):
    """Failure of a command; the message says why and what to do."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


class LocatedError(CommandError):
    """Failure whose lines begin with FILE:LINE:COLUMN, so that editors find the place."""


def describe_os_error(error: OSError, name: object = None) -> str:
    """Return the system's reason, the file's name and a remedy."""
    what = (error.strerror or str(error) or type(error).__name__).lower()
    remedy = _REMEDIES.get(error.errno or 0)
    reason = f"{what}; {remedy}" if remedy else what
    file = name if name is not None else error.filename
    if isinstance(file, bytes):
        file = file.decode("utf-8", "backslashreplace")
    return reason if file is None or isinstance(file, int) else f"{file}: {reason}"
