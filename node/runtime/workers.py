"""A node's worker threads: a general pool, and threads reserved for low-latency work.

The general pool may be busy for an hour with saves, restores, checks and copies. Work that a
client's next token waits for runs on the reserved threads.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

from fabric.errors import OverloadedError
from node.limits import (
    FETCHES_MAX,
    FETCHES_WAITING_MAX,
    HEAD_FETCHES_MAX,
    LOW_LATENCY_WORKERS,
)

_LOW_LATENCY = ContextVar("low_latency", default=False)


@contextmanager
def low_latency() -> Iterator[None]:
    """Run the work of this task, and of those it starts, on the reserved threads."""
    token = _LOW_LATENCY.set(True)
    try:
        yield
    finally:
        _LOW_LATENCY.reset(token)


def is_low_latency() -> bool:
    """Return whether this task's work runs on the reserved threads."""
    return _LOW_LATENCY.get()


T = TypeVar("T")
WORKERS = 8


class Workers:
    """Worker threads of a node; used on its event loop. Low-latency work has threads of its own."""

    def __init__(self, count: int = WORKERS) -> None:
        self._workers = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._fetchers = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="fetch")
        self._low_latency_workers = ThreadPoolExecutor(
            LOW_LATENCY_WORKERS, thread_name_prefix="worker_now"
        )
        self._low_latency_fetchers = ThreadPoolExecutor(
            LOW_LATENCY_WORKERS, thread_name_prefix="fetch_now"
        )
        self._head_fetchers = ThreadPoolExecutor(HEAD_FETCHES_MAX, thread_name_prefix="head")
        self.fetching_count = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work (disk, hashing) on a worker thread."""
        workers = self._low_latency_workers if is_low_latency() else self._workers
        return await asyncio.get_running_loop().run_in_executor(workers, copy_context().run, work)

    def begin(self, work: Callable[[], None]) -> None:
        """Begin blocking work whose result is not awaited."""
        self._workers.submit(work)

    async def fetch(self, work: Callable[[], T]) -> T:
        """Run a fetch, which may take an hour, without delaying turns."""
        if self.fetching_count >= FETCHES_WAITING_MAX:
            message = (
                f"{FETCHES_WAITING_MAX} agents are already being copied to this node; retry later"
            )
            raise OverloadedError(message)
        self.fetching_count += 1
        fetchers = self._low_latency_fetchers if is_low_latency() else self._fetchers
        try:
            return await asyncio.get_running_loop().run_in_executor(fetchers, work)
        finally:
            self.fetching_count -= 1

    async def fetch_head(self, work: Callable[[], T]) -> T:
        """Run a turn's request to another node, or its fetch, on threads without copies."""
        self.fetching_count += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._head_fetchers, work)
        finally:
            self.fetching_count -= 1

    def close(self) -> None:
        """End the threads; waiting fetches are dropped."""
        self._workers.shutdown()
        self._low_latency_workers.shutdown()
        self._fetchers.shutdown(cancel_futures=True)
        self._low_latency_fetchers.shutdown(cancel_futures=True)
        self._head_fetchers.shutdown(cancel_futures=True)
