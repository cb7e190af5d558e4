"""Work of runs in threads: whoever shares the event loop is served meanwhile.

They have threads of their own: those of asyncio may all be waiting for agents' answers.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = 4
_WORKERS = ThreadPoolExecutor(_THREADS, thread_name_prefix="scenario")


async def beside(work: Callable[[], T]) -> T:
    """Do work in a thread; it is done in any case, also where nobody waits for it any more."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work)
