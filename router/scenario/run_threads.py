"""Threads for the blocking work of runs: journals and long prompts.

The pool is separate from asyncio's default one, whose threads may all be waiting for answers.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = 4
_WORKERS = ThreadPoolExecutor(_THREADS, thread_name_prefix="scenario")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run a function in a thread; it finishes even if its caller is cancelled."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work)
