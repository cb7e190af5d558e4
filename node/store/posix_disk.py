"""Disk: atomic, durable publish and read of small trees of files under one root.

The only module that opens files. A name is `leaf` or `directory/leaf` of lower-case letters,
digits and `._-`, so no outside text can leave the root, and no symbolic link below the root
is followed. Publish: temporary file in the same directory, write, flush, rename, flush the
directory; whatever fails on the way removes the temporary and leaves the old file as it was.
Only the last flush of a publish or removal empties the drive's cache; the others keep the order,
which on macOS costs a small part of that.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final

from fabric.errors import CorruptDataError, FabricError, RejectedError
from fabric.hosting.disk_flush import flush
from fabric.ports import DriveSpace, OpenFile
from fabric.settings import DURABILITIES
from node.limits import QUARANTINE_FILES_MAX, QUARANTINE_REASON_CHARS_MAX
from node.store.descriptors import (
    OPEN_DIRECTORY,
    OpenPayload,
    Payload,
    closing,
    make_private,
    read_all,
    scan,
    trim,
    write_all,
)

Part = bytes | bytearray | memoryview
QUARANTINE: Final = "quarantine"
_CLOSED: Final = -1
TEMPORARY: Final = ".tmp-"
_PART: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}", re.ASCII)
_OPEN: Final = os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a planted pipe must not hang the reader.
_OPEN_READ: Final = os.O_RDONLY | os.O_NONBLOCK | _OPEN
_OPEN_TEMP: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN

_log = logging.getLogger(__name__)


class DiskError(FabricError):
    """The disk refused: full, over quota, read-only, failing, or taken by another process."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "disk_error"

    def __init__(self, message: str, cause: int | None = None) -> None:
        super().__init__(message)
        self.cause = cause  # errno
        self.is_in_place = False  # a publish failed at its last step: the new file is in place
        self.is_gone = False  # the folder is no longer at its path

    @property
    def reason(self) -> str:
        """The system's error message, without file names."""
        return os.strerror(self.cause) if self.cause is not None else "the disk refused"

    @property
    def is_full(self) -> bool:
        """Whether the disk is full, rather than faulty."""
        return self.cause in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

    @property
    def is_damage(self) -> bool:
        """Whether the drive lost or damaged data."""
        return self.cause == errno.EIO


class _GoneError(OSError):
    """A folder that was removed, moved away, or is on a drive that was unplugged."""


class PosixDisk:
    """A fabric.ports.Disk over the directory `root`, which it creates unless it `must_exist`."""

    def __init__(
        self,
        root: Path | str,
        durability: str = "full",
        *,
        keeps_modes: bool = False,
        must_exist: bool = False,
    ) -> None:
        assert durability in DURABILITIES, "settings name one of three levels"
        self._durability = durability
        self._ordering = "none" if durability == "none" else "barrier"
        self._keeps_modes = keeps_modes  # read-only use leaves file modes unchanged
        self._prefix = f"{TEMPORARY}{secrets.token_hex(4)}-"
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._directories: dict[str, int] = {}
        self._unflushed: set[int] = set()  # directories with removals that are not durable
        self._leftovers: set[tuple[str, str]] = set()  # folders and temporaries in them
        self._is_claimed = False
        # The operator may link the root to a larger drive; below it nothing is followed.
        self.root = Path(root).expanduser().resolve()
        with _disk_errors(f"open {self.root}"):
            if not must_exist:
                self._make_root(self.root)
            self._root = os.open(self.root, OPEN_DIRECTORY)
            try:
                self._make_private(self._root)
            except BaseException:
                os.close(self._root)
                raise
        self._mount = _mount_of(self.root)

    def claim(self) -> None:
        """Hold the root for this process until `close`; raise DiskError if another does."""
        with _disk_errors(f"claim {self.root}, perhaps in use by another node,"):
            fcntl.flock(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._is_claimed = True

    def is_here(self) -> bool:
        """Return whether the folders that are open are those at their paths."""
        with self._lock:
            opened = [("", self._root), *self._directories.items()]
        try:
            for directory, descriptor in opened:
                self._require_here(directory, descriptor)
        except OSError:
            return False
        return True

    def require_mount(self) -> None:
        """Raise DiskError while the drive that held the root at the start is not mounted.

        Otherwise the folder would fill the drive on which the mount point lies.
        """
        if _mount_of(self.root) != self._mount:
            message = f"cannot open {self.root}: its drive is not mounted"
            raise DiskError(message, errno.ENODEV)

    def reopen(self) -> None:
        """Open the folders at their paths again, and create the missing ones; raise DiskError.

        The descriptors keep their numbers, so that calls of other threads that run meanwhile
        reach the old folders or the new ones, and no other file.
        """
        self.require_mount()
        with _disk_errors(f"open {self.root} again"), self._lock:
            self._make_root(self.root)
            with closing(os.open(self.root, OPEN_DIRECTORY)) as root:
                if not self._is_same(root, self._root):
                    self._make_private(root)
                    if self._is_claimed:
                        fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.dup2(root, self._root, inheritable=False)
            self._unflushed.clear()
            self._leftovers.clear()
            for directory, descriptor in self._directories.items():
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700, dir_fd=self._root)
                with closing(os.open(directory, OPEN_DIRECTORY, dir_fd=self._root)) as opened:
                    os.dup2(opened, descriptor, inheritable=False)
            flush(self._root, self._ordering)

    def recover(self) -> int:
        """Claim the root for this process and remove half-written files; return their number."""
        self.claim()
        return self.recover_temporaries()

    def recover_temporaries(self) -> int:
        """Remove files that a crash left half-written; return their number."""
        removed = 0
        with _disk_errors(f"recover {self.root}"):
            ours = [name for name, is_dir in scan(self._root) if is_dir and _PART.fullmatch(name)]
            for directory in ("", *ours):
                at = self._directory(directory)
                temps = [name for name, _ in scan(at) if name.startswith(TEMPORARY)]
                for temp in temps:
                    os.unlink(temp, dir_fd=at)
                removed += len(temps)
                # A process that was killed before its last flush relies on this flush.
                flush(at, self._ordering)
            flush(self._root, self._durability)
        return removed

    def close(self) -> None:
        """Close the root, once no other call runs; later calls fail."""
        if self._root != _CLOSED:
            for descriptor in (self._root, *self._directories.values()):
                os.close(descriptor)
        self._root = _CLOSED
        self._directories.clear()

    def publish(self, name: str, parts: Sequence[Part]) -> None:
        """Make `name` hold exactly `parts`, atomically and durably, replacing any old file."""
        self._publish(name, parts, self._durability)

    def publish_ordered(self, name: str, parts: Sequence[Part]) -> None:
        """Publish a file that becomes durable no later than any file published after it."""
        self._publish(name, parts, self._ordering)

    def _publish(self, name: str, parts: Iterable[Part], durability: str) -> None:
        directory, leaf = _split(name)
        with _disk_errors(f"publish {name}"):
            at = self._directory(directory, create=True)
            self._require_here("", self._root)
            self._require_here(directory, at)
            temp = f"{self._prefix}{next(self._serial)}"
            descriptor = os.open(temp, _OPEN_TEMP, 0o600, dir_fd=at)
            try:
                with closing(descriptor):
                    self._write(descriptor, parts)
                    # A failed flush is final: the kernel may since call the lost pages clean.
                    flush(descriptor, self._ordering)
                os.rename(temp, leaf, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                self._discard(directory, temp)
                raise
        with _disk_errors(f"make durable {name}", in_place=True):
            flush(at, durability)
        with _disk_errors(f"publish {name}"):
            self._require_here("", self._root)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return the whole file; raise FileNotFoundError, or CorruptDataError over the limit."""
        with self._reading(name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size > limit_bytes:
                message = f"{name} has {size} bytes, over the limit of {limit_bytes}"
                raise CorruptDataError(message)
            raw = bytearray(size)
            count = read_all(descriptor, [memoryview(raw)])
            return bytes(memoryview(raw)[:count])

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        """Open a file for several reads; raise FileNotFoundError."""
        with self._reading(name) as descriptor:
            yield _PlainFile(descriptor)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` from `offset` in order; return the bytes read (short at end of file)."""
        with self.opened(name) as file:
            return file.read_into(buffers, offset)

    def open_payload(self, name: str) -> int:
        """Open a file read-only; the caller closes the descriptor."""
        directory, leaf = _split(name)
        with _disk_errors(f"read {name}", may_miss=True):
            try:
                descriptor = os.open(leaf, _OPEN_READ, dir_fd=self._directory(directory))
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                message = f"{name} is a symbolic link"
                raise CorruptDataError(message) from None
            is_file = False
            try:
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            finally:
                if not is_file:
                    os.close(descriptor)
        if not is_file:
            message = f"{name} is not a regular file"
            raise CorruptDataError(message)
        return descriptor

    def lend(self, name: str, start: int, length: int) -> Payload:
        """Open a part of a file for sending; the caller closes it."""
        return OpenPayload(self.open_payload(name), start, length)

    def size_bytes(self, name: str) -> int:
        """Return the file's length; raise FileNotFoundError."""
        directory, leaf = _split(name)
        with _disk_errors(f"examine {name}", may_miss=True):
            status = os.stat(leaf, dir_fd=self._directory(directory), follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            message = f"{name} is not a regular file"
            raise CorruptDataError(message)
        return status.st_size

    def list_names(self, directory: str) -> list[str]:
        """List file names directly under `directory` (no temporaries), sorted."""
        _split(f"{directory}/x")
        with _disk_errors(f"list {directory}"):
            try:
                entries = scan(self._directory(directory))
            except FileNotFoundError:
                return []
        return [name for name, is_dir in entries if not is_dir and _PART.fullmatch(name)]

    def remove(self, name: str) -> bool:
        """Remove a file durably; return whether it existed."""
        return self.remove_all([name]) == 1

    def remove_all(self, names: Sequence[str]) -> int:
        """Remove files durably, flushing each directory once; return how many existed."""
        removed: Counter[int] = Counter()
        places: set[int] = set()
        try:
            with _disk_errors("remove files"):
                self._require_here("", self._root)
            for directory, leaf in map(_split, names):
                with _disk_errors(f"remove {leaf}"), contextlib.suppress(FileNotFoundError):
                    at = self._directory(directory)
                    places.add(at)
                    os.unlink(leaf, dir_fd=at)
                    removed[at] += 1
            changed = [at for at in places if removed[at] or at in self._unflushed]
            for at in changed:
                with _disk_errors("make a removal durable"):
                    flush(at, self._durability if at == changed[-1] else self._ordering)
        except BaseException:
            # A retry finds no file, which does not make the removal durable.
            self._unflushed.update(at for at in places if removed[at])
            raise
        self._unflushed.difference_update(places)
        return removed.total()

    def quarantine(self, name: str, reason: str) -> None:
        """Move a damaged file out of the way, keeping it for inspection."""
        directory, leaf = _split(name)
        slug = re.sub(r"[^a-z0-9]+", "-", reason.lower())[:QUARANTINE_REASON_CHARS_MAX].strip("-")
        _log.error("quarantined %s: %s", name, reason)
        with _disk_errors(f"quarantine {name}"):
            at = self._directory(directory)
            quarantine = self._directory(QUARANTINE, create=True)
            try:
                os.rename(leaf, f"{leaf}.{slug}", src_dir_fd=at, dst_dir_fd=quarantine)
            except FileNotFoundError:
                return  # another thread has already quarantined it
            flush(at, self._ordering)
            flush(quarantine, self._ordering)
            with contextlib.suppress(FileNotFoundError):  # another thread trims as well
                trim(quarantine, QUARANTINE_FILES_MAX)

    def drive(self) -> DriveSpace:
        with _disk_errors("read the free space"):
            space = os.fstatvfs(self._root)
        return DriveSpace(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)

    def _write(self, descriptor: int, parts: Iterable[Part]) -> None:
        write_all(descriptor, list(parts))

    def _discard(self, directory: str, temp: str) -> None:
        """Remove a temporary now, or note that a failing drive keeps it."""
        try:
            os.unlink(temp, dir_fd=self._directory(directory))
        except FileNotFoundError:
            return
        except OSError:
            with self._lock:
                self._leftovers.add((directory, temp))

    def remove_leftovers(self) -> None:
        """Remove the temporaries that failed writes could not; raise DiskError."""
        with self._lock:
            leftovers = sorted(self._leftovers)
        for directory, temp in leftovers:
            with _disk_errors("remove a temporary"), contextlib.suppress(FileNotFoundError):
                os.unlink(temp, dir_fd=self._directory(directory))
            with self._lock:
                self._leftovers.discard((directory, temp))

    def _require_here(self, directory: str, descriptor: int) -> None:
        """Raise _GoneError unless an open folder is the one at its path; or OSError."""
        opened = os.fstat(descriptor)
        try:
            if directory:
                at_path = os.stat(directory, dir_fd=self._root, follow_symlinks=False)
            else:
                at_path = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            at_path = None
        if at_path is None or not os.path.samestat(opened, at_path):
            message = "the folder is gone"
            raise _GoneError(errno.ENOENT, message)

    @staticmethod
    def _is_same(descriptor: int, other: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.fstat(other))
        except OSError:  # the drive is gone
            return False

    def _make_root(self, path: Path) -> None:
        if path.exists():
            return
        self._make_root(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with closing(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)) as parent:
            flush(parent, self._durability)

    def _make_private(self, root: int) -> None:
        """Make an open root private; raise DiskError where it is not this user's own."""
        if self._keeps_modes:
            return
        status = os.fstat(root)
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            message = f"{self.root} belongs to, or may be written by, other users"
            raise DiskError(message, errno.EPERM)
        make_private(root)

    def _directory(self, directory: str, *, create: bool = False) -> int:
        """Return the descriptor of one of our few directories."""
        if self._root == _CLOSED:
            message = "the disk is closed"
            raise OSError(errno.EBADF, message)
        if not directory:
            return self._root
        with self._lock:
            descriptor = self._directories.get(directory)
            if descriptor is not None:
                return descriptor
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700, dir_fd=self._root)
            # Even if it existed: its creator may have died before this flush.
            flush(self._root, self._ordering)
            opened = os.open(directory, OPEN_DIRECTORY, dir_fd=self._root)
            self._directories[directory] = opened
            if not self._keeps_modes:
                make_private(opened)
            return opened

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[int]:
        with closing(self.open_payload(name)) as descriptor, _disk_errors(f"read {name}"):
            yield descriptor


@dataclass(frozen=True, slots=True)
class _PlainFile:
    """An open file that is not encrypted."""

    descriptor: int

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        # lseek + readv on a descriptor of our own: preadv is missing on older macOS.
        os.lseek(self.descriptor, offset, os.SEEK_SET)
        return read_all(self.descriptor, buffers)


@contextlib.contextmanager
def _disk_errors(action: str, *, may_miss: bool = False, in_place: bool = False) -> Iterator[None]:
    """Turn any system error into a DiskError that names the failed operation."""
    try:
        yield
    except OSError as error:
        if may_miss and isinstance(error, FileNotFoundError):
            raise
        message = f"cannot {action}: {error.strerror or error}"
        refusal = DiskError(message, error.errno)
        refusal.is_in_place = in_place
        refusal.is_gone = isinstance(error, _GoneError)
        try:
            raise refusal from error
        finally:
            del refusal  # its traceback holds this frame: a cycle would keep the buffers alive


def _mount_of(path: Path) -> Path:
    """Return the mount point of a path, or of the nearest folder above it that exists."""
    while not os.path.ismount(path) and path != path.parent:
        path = path.parent
    return path


def _split(name: str) -> tuple[str, str]:
    directory, slash, leaf = name.rpartition("/")
    if not _PART.fullmatch(leaf) or (slash and not _PART.fullmatch(directory)):
        message = "a file name is `leaf` or `directory/leaf` of a-z 0-9 . _ -"
        raise RejectedError(message, code="invalid_file_name")
    return directory, leaf
