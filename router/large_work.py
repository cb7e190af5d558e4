"""Work on large bodies goes to threads, so that the event loop serves everybody else meanwhile.

One at a time per tenant: whoever sends many large ones waits for them alone.
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

LARGE_BYTES = 64 * KIB  # a millisecond's work
WORKERS = 4
_CONTAINER_BYTES = 32

_WORKERS = ThreadPoolExecutor(WORKERS, thread_name_prefix="large")
_Locks = WeakValueDictionary[str, asyncio.Lock]
_LOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Locks] = WeakKeyDictionary()


async def run_sized(owner: str, size_bytes: int, work: Callable[[], T]) -> T:
    """Do work on so many bytes here, or in a thread in the owner's turn."""
    return work() if size_bytes <= LARGE_BYTES else await run_apart(owner, work)


async def run_apart(owner: str, work: Callable[[], T]) -> T:
    """Do work of unknown size in a thread, in the owner's turn."""
    loop = asyncio.get_running_loop()
    locks = _LOCKS.setdefault(loop, WeakValueDictionary())
    lock = locks.get(owner)
    if lock is None:
        lock = locks[owner] = asyncio.Lock()
    async with lock:
        return await loop.run_in_executor(_WORKERS, _lightly, work)


def _lightly(work: Callable[[], T]) -> T:
    """Do work; what it raises holds neither its frames nor its cause, and so no large body."""
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
    """Estimate the bytes of messages and plain data as JSON; stops counting over the limit."""
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
