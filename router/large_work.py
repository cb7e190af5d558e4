"""Work on large bodies in threads, so that the event loop keeps serving other requests.

One at a time per tenant, so that a tenant with many large bodies delays only itself.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from fabric.errors import FabricError
from fabric.limits import KIB
from fabric.turn.messages import Message, ToolUse

T = TypeVar("T")

LARGE_BYTES = 64 * KIB  # takes about a millisecond
WORKERS = 4
_CONTAINER_BYTES = 32

_WORKERS = ThreadPoolExecutor(WORKERS, thread_name_prefix="large")
_Locks = WeakValueDictionary[str, asyncio.Lock]
_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Locks] = WeakKeyDictionary()


async def run_sized(owner: str, size_bytes: int, work: Callable[[], T]) -> T:
    """Run work on `size_bytes` here, or if it is large in a thread, one at a time per owner."""
    return work() if size_bytes <= LARGE_BYTES else await run_apart(owner, work)


async def run_apart(owner: str, work: Callable[[], T]) -> T:
    """Run work of unknown size in a thread, one at a time per owner."""
    loop = asyncio.get_running_loop()
    locks = _LOCKS.setdefault(loop, WeakValueDictionary())
    lock = locks.get(owner)
    if lock is None:
        lock = locks[owner] = asyncio.Lock()
    async with lock:
        return await loop.run_in_executor(_WORKERS, _without_frames, work)


def _without_frames(work: Callable[[], T]) -> T:
    """Run work; its errors keep neither frames nor cause, which would keep large bodies alive."""
    try:
        return work()
    except FabricError as error:
        refused = error
    refused.__context__ = None
    try:
        raise refused.with_traceback(None)
    finally:
        del refused


def weigh(value: Any, limit: int = LARGE_BYTES) -> int:
    """Estimate the bytes of messages and plain data as JSON; stop counting above the limit."""
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Message):
            stack += (item.texts, item.reasoning, item.uses)
        elif isinstance(item, ToolUse):
            stack.append(item.arguments)
        elif isinstance(item, dict):
            total += _CONTAINER_BYTES * len(item)
            if total <= limit:
                stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            total += _CONTAINER_BYTES + len(item)
            if total <= limit:
                stack.extend(item)
    return total
