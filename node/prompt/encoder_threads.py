"""Threads that render and encode prompts, apart from those that save and load.

Encoding takes memory and time by the byte, so the bytes encoded at once are limited; later prompts
wait in a queue. Small prompts are not counted and wait for a thread only.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from node.limits import ENCODERS, ENCODING_BYTES_MAX, ENCODING_SMALL_BYTES

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class EncoderThreads:
    """Encoder threads of a node; used on its event loop."""

    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
    )
    _used_bytes: int = 0
    _waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    async def run(self, work: Callable[[], T], size_bytes: int = 0) -> T:
        """Run `work` on a thread, once `size_bytes` fit the limit."""
        async with self._count_bytes(size_bytes):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown()

    @contextlib.asynccontextmanager
    async def _count_bytes(self, size_bytes: int) -> AsyncIterator[None]:
        if size_bytes <= ENCODING_SMALL_BYTES:
            yield
            return
        size_bytes = min(size_bytes, ENCODING_BYTES_MAX)
        await self._acquire(size_bytes)
        try:
            yield
        finally:
            self._used_bytes -= size_bytes
            self._admit_waiting()

    async def _acquire(self, size_bytes: int) -> None:
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, admitted))
        self._admit_waiting()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted, then cancelled at once
                self._used_bytes -= size_bytes
            self._admit_waiting()
            raise

    def _admit_waiting(self) -> None:
        while self._waiting:
            size_bytes, admitted = self._waiting[0]
            if admitted.cancelled():
                self._waiting.popleft()
                continue
            if self._used_bytes + size_bytes > ENCODING_BYTES_MAX:
                return
            self._waiting.popleft()
            self._used_bytes += size_bytes
            admitted.set_result(None)
