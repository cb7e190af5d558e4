"""Complete reads and writes, and listings, on open file descriptors.

`os.read` and `os.write` may transfer only part of a buffer; these functions finish the rest. Errors
are the system's OSError.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Protocol

from fabric.errors import CorruptDataError

OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
IOVECS_MAX: Final = 1_024  # IOV_MAX of Linux and macOS
_NBYTES: Final[Callable[[memoryview], int]] = attrgetter("nbytes")


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close `descriptor` at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def scan(directory: int) -> list[tuple[str, bool]]:
    """List names, sorted, and whether each is a directory."""
    # Its own descriptor: threads would share the read position of a shared one.
    with closing(os.open(".", OPEN_DIRECTORY, dir_fd=directory)) as own, os.scandir(own) as entries:
        return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)


def trim(directory: int, files_max: int) -> None:
    """Remove the files that have been in `directory` longest."""
    ages = [
        (os.stat(name, dir_fd=directory, follow_symlinks=False).st_ctime_ns, name)
        for name, _ in scan(directory)
    ]
    for _, name in sorted(ages, reverse=True)[files_max:]:
        os.unlink(name, dir_fd=directory)


def make_private(directory: int) -> None:
    """Remove other users' permissions from one of our directories."""
    if os.fstat(directory).st_mode & 0o077:
        os.fchmod(directory, 0o700)


def write_all(descriptor: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """Write every byte of `parts` in order, with repeated calls if necessary."""
    for window in _windows([memoryview(part) for part in parts]):
        left = window
        while left:
            count = os.writev(descriptor, left)
            if count == 0:
                message = "nothing was written"
                raise OSError(errno.EIO, message)
            left = _after(left, count)


def read_all(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Fill `buffers` in order; return the bytes read, fewer only at the end of the file."""
    total = 0
    for window in _windows(buffers):
        left = window
        while left:
            count = os.readv(descriptor, left)
            if count == 0:
                return total
            total += count
            left = _after(left, count)
    return total


def _windows(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Cut `views` into what one call takes, leaving out the empty ones."""
    filled = [view for view in views if view.nbytes]
    for start in range(0, len(filled), IOVECS_MAX):
        yield filled[start : start + IOVECS_MAX]


def _after(window: list[memoryview], count: int) -> list[memoryview]:
    """Return the part of `window` after its first `count` bytes."""
    sizes = list(map(_NBYTES, window))
    if count == sum(sizes):
        return []
    for index, size in enumerate(sizes):
        if count < size:
            return [window[index].cast("B")[count:], *window[index + 1 :]]
        count -= size
    message = "the system moved more bytes than it was given room for"
    raise AssertionError(message)


SHORTER: Final = "the block's file is shorter than its record says"


class Payload(Protocol):
    """Bytes of a block; the caller closes it."""

    @property
    def length(self) -> int: ...

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view`; raise CorruptDataError where there are fewer bytes, or damaged ones."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenPayload:
    """A block's payload in an open file."""

    descriptor: int
    start: int
    length: int

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view`; raise CorruptDataError where the file has fewer bytes.

        Not memory-mapped: a file that shrinks would raise SIGBUS while its MAC is computed.
        """
        if os.preadv(self.descriptor, [view], self.start + offset) != len(view):
            raise CorruptDataError(SHORTER)

    def close(self) -> None:
        os.close(self.descriptor)
