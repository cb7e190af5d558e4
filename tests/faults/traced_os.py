"""Traces of the real PosixDisk on a real file system, which can be stopped at any operation."""

import fcntl
import os
from functools import partial
from pathlib import Path

from fabric.hosting import disk_flush
from node.store import posix_disk
from tests.faults.crash_disk import EmptyCache, Flush, FlushDirectory, Trace, Write

PATCHED = ("open", "close", "writev", "fsync", "rename", "unlink", "mkdir")


class Killed(BaseException):
    """Raised when the traced process dies; later operations have no effect."""


class TracedOs:
    """Recorder of a PosixDisk's system calls at `root`, which can stop it at any of them."""

    def __init__(self, monkeypatch, root: Path, platform: str = "linux") -> None:
        self.trace = Trace()
        self.die_after: int | None = None  # operations until the stop
        self._root = str(root)
        self._open: dict[int, str | int] = {}  # descriptor to directory or inode
        self._written: dict[int, int] = {}
        self._real = {name: getattr(os, name) for name in PATCHED}
        self._real["fsync"] = lambda _fd: None  # the kind of flush is decided here
        for name in PATCHED:
            monkeypatch.setattr(os, name, self._stepping(name))
        self._fcntl = fcntl.fcntl
        monkeypatch.setattr(fcntl, "fcntl", self._saw_fcntl)
        flush = partial(disk_flush.flush, platform=platform)
        monkeypatch.setattr(posix_disk, "flush", flush)

    def _stepping(self, name: str):
        def call(*args, **kwargs):
            if name != "close":
                self._step()
            result = self._real[name](*args, **kwargs)
            getattr(self, f"_saw_{name}")(result, *args, **kwargs)
            return result

        return call

    def _step(self) -> None:
        if self.die_after == 0:
            raise Killed
        if self.die_after is not None:
            self.die_after -= 1

    def _saw_open(self, fd, path, flags, mode=0o777, *, dir_fd=None) -> None:
        parent = self._open.get(dir_fd)
        if flags & os.O_CREAT:
            self._open[fd] = self.trace.create(parent, path)
            self._written[fd] = 0
        elif flags & os.O_DIRECTORY:
            if str(path) == self._root:
                self._open[fd] = ""
            elif parent is not None:
                self._open[fd] = parent if path == "." else path

    def _saw_close(self, _result, fd) -> None:
        self._open.pop(fd, None)

    def _saw_writev(self, count, fd, views) -> None:
        if fd in self._open:
            data = b"".join(bytes(view) for view in views)[:count]
            self.trace.ops.append(Write(self._open[fd], self._written[fd], data))
            self._written[fd] += count

    def _saw_fsync(self, _result, fd) -> None:
        self._note_flush(fd)
        self.trace.ops.append(EmptyCache())

    def _saw_fcntl(self, fd, command, *arguments):
        """Emulate macOS's commands; pass others to the system."""
        if command not in (disk_flush.BARRIER, disk_flush.FULL_FLUSH):
            return self._fcntl(fd, command, *arguments)
        self._step()
        self._note_flush(fd)
        if command == disk_flush.FULL_FLUSH:
            self.trace.ops.append(EmptyCache())
        return 0

    def _note_flush(self, fd) -> None:
        at = self._open.get(fd)
        if at is not None:
            self.trace.ops.append(FlushDirectory(at) if isinstance(at, str) else Flush(at))

    def _saw_rename(self, _result, old, new, *, src_dir_fd, dst_dir_fd) -> None:
        source, target = self._open[src_dir_fd], self._open[dst_dir_fd]
        if source == target:
            self.trace.rename(source, old, new)
        else:
            self.trace.move((source, old), (target, new))

    def _saw_unlink(self, _result, name, *, dir_fd) -> None:
        self.trace.unlink(self._open[dir_fd], name)

    def _saw_mkdir(self, _result, name, _mode=0, *, dir_fd=None) -> None:
        if dir_fd is not None:
            self.trace.create("", name)
