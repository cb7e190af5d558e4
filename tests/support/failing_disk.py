"""Injected failures of a real disk's system calls, for the whole process."""

import errno
import os
import time
from dataclasses import dataclass, field

CALLS = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "stat", "fstat", "readv", "lseek")
WRITES = ("mkdir", "writev", "fsync", "rename", "unlink")


@dataclass
class FailingCalls:
    """Injected failures of calls by node.store.posix_disk and node.store.descriptors.

    With `point`, only the call of that number fails. Without it, every call in `calls` fails until
    `mend`.
    """

    cause: int = errno.EIO
    calls: tuple[str, ...] = CALLS
    point: int | None = None
    delay_s: float = 0.0
    is_broken: bool = False
    calls_count: int = 0
    failed: list[str] = field(default_factory=list)

    def mend(self) -> None:
        """Make every later call succeed."""
        self.is_broken = False

    def install(self, monkeypatch) -> "FailingCalls":
        """Replace `os` in the modules that access the disk."""
        from node.store import descriptors, posix_disk

        stand_in = _Os(self)
        monkeypatch.setattr(posix_disk, "os", stand_in)
        monkeypatch.setattr(descriptors, "os", stand_in)
        return self

    def step(self, name: str, args: tuple, kwargs: dict) -> None:
        """Fail or delay one call."""
        number, self.calls_count = self.calls_count, self.calls_count + 1
        time.sleep(self.delay_s)
        if self.cause == errno.EROFS and name == "open" and not args[1] & os.O_CREAT:
            return  # a read-only disk can still be read
        if number == self.point or (self.point is None and name in self.calls):
            self.failed.append(name)
            raise OSError(self.cause, os.strerror(self.cause))


class _Os:
    """The os module with some calls intercepted."""

    def __init__(self, faults: FailingCalls) -> None:
        self._faults = faults

    def __getattr__(self, name: str):
        call = getattr(os, name)
        if name == "fsync":
            call = _no_flush  # the drive itself does not fail here
        if name not in CALLS:
            return call

        def watched(*args, **kwargs):
            if self._faults.is_broken:
                self._faults.step(name, args, kwargs)
            return call(*args, **kwargs)

        return watched


def _no_flush(_descriptor: int) -> None:
    return None
