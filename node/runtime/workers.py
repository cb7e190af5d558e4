"""A node's threads for work that blocks: disk and hashing, and fetches from other nodes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fabric.errors import OverloadedError
from fabric.limits import FETCHES_MAX, FETCHES_WAITING_MAX, HASTY_WORKERS
from node.haste import in_haste

T = TypeVar("T")
WORKERS = 8


class Workers:
    """One node's; lives on its event loop. Work in haste has threads of its own."""

    def __init__(self, count: int = WORKERS) -> None:
        self._workers = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._fetchers = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="fetch")
        self._hasty_workers = ThreadPoolExecutor(HASTY_WORKERS, thread_name_prefix="worker_now")
        self._hasty_fetchers = ThreadPoolExecutor(HASTY_WORKERS, thread_name_prefix="fetch_now")
        self.fetching_count = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work (disk, hashing) on a worker thread."""
        workers = self._hasty_workers if in_haste() else self._workers
        return await asyncio.get_running_loop().run_in_executor(workers, work)

    async def fetch(self, work: Callable[[], T]) -> T:
        """Run a fetch, which may take an hour, where it holds up no turn's work."""
        if self.fetching_count >= FETCHES_WAITING_MAX:
            message = f"{FETCHES_WAITING_MAX} agents are being copied here"
            raise OverloadedError(message)
        self.fetching_count += 1
        fetchers = self._hasty_fetchers if in_haste() else self._fetchers
        try:
            return await asyncio.get_running_loop().run_in_executor(fetchers, work)
        finally:
            self.fetching_count -= 1

    def close(self) -> None:
        """End the threads; fetches that wait for one are given up."""
        self._workers.shutdown()
        self._hasty_workers.shutdown()
        self._fetchers.shutdown(cancel_futures=True)
        self._hasty_fetchers.shutdown(cancel_futures=True)
