"""Concurrent reads of blocks: one waits for the drive while others are checked.

The calling thread reads, too, so a pool that is busy with other restores delays none. Reads of
one restore start in order; the first failure ends it, once the running reads have ended.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

from node.limits import BLOCK_READERS

_POOL: Final = ThreadPoolExecutor(BLOCK_READERS - 1, thread_name_prefix="block reader")


class UnreadBlockError(Exception):
    """A block was not read: it is missing or not the expected one, or the restore was cancelled."""


class BlockReads:
    """The reads of one restore."""

    def __init__(self, count: int, read: Callable[[int], None]) -> None:
        """Prepare to read blocks 0 to `count` by `read(index)`, which raises where one fails."""
        self._count = count
        self._read = read
        self._lock = threading.Lock()
        self._next = 0
        self._failed: dict[int, BaseException] = {}

    def run(self, readers_count: int = BLOCK_READERS) -> tuple[int, BaseException | None]:
        """Return how many leading blocks were read, and why no more were; raise nothing."""
        helpers_count = min(readers_count, self._count) - 1
        helpers = [_POOL.submit(self._pull) for _ in range(helpers_count)]
        self._pull()
        wait([helper for helper in helpers if not helper.cancel()])
        if not self._failed:
            return self._count, None
        first = min(self._failed)
        return first, self._failed[first]

    def _pull(self) -> None:
        while (index := self._take()) is not None:
            try:
                self._read(index)
            except UnreadBlockError:
                with self._lock:  # a new one: that one's traceback would keep the cache alive
                    self._failed[index] = UnreadBlockError()
            except BaseException as error:  # noqa: BLE001 - the caller of `run` decides
                with self._lock:
                    self._failed[index] = error

    def _take(self) -> int | None:
        with self._lock:
            if self._failed or self._next >= self._count:
                return None
            self._next += 1
            return self._next - 1


def failed_reads(
    count: int, read: Callable[[int], None], readers_count: int = BLOCK_READERS
) -> Iterator[int]:
    """Read blocks 0 to `count`; yield each that raises UnreadBlockError, and continue after it.

    Any other error of a read is raised.
    """
    first = 0
    while first < count:
        done, error = BlockReads(count - first, lambda at: read(first + at)).run(readers_count)  # noqa: B023
        if error is None:
            return
        if not isinstance(error, UnreadBlockError):
            raise error
        yield first + done
        first += done + 1
