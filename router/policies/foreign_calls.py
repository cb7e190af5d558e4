"""Calls of operators' policies: in separate threads, with a timeout.

A thread cannot be stopped from outside. While a late one runs, its policy is not called again, or
each turn would leave another running thread.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Generic, TypeVar

from router.limits import POLICY_CALLS_MAX, POLICY_S

T = TypeVar("T")


class PolicyLateError(Exception):
    """A policy exceeded its time limit, or is still running from an earlier turn."""


class ForeignCalls(Generic[T]):
    """Limited calls of one policy."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(POLICY_CALLS_MAX)
        self._late = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of work that raises nothing; raise PolicyLateError if it is late."""
        if self._late:
            message = "is still busy with an earlier turn"
            raise PolicyLateError(message)
        ended: asyncio.Future[T] | None = None
        try:
            async with asyncio.timeout(POLICY_S):
                await self._places.acquire()
                ended = self._start(work)
                return await asyncio.shield(ended)
        except TimeoutError:
            if ended is not None:
                self._late += 1
                ended.add_done_callback(self._came_late)
            message = f"took longer than {POLICY_S:g} s"
            raise PolicyLateError(message) from None

    def _start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()
        ended.add_done_callback(lambda _: self._places.release())

        def call() -> None:
            finish = partial(ended.set_exception, RuntimeError("the policy ended without a result"))
            try:
                finish = partial(ended.set_result, work())
            finally:
                with suppress(RuntimeError):  # the router has stopped meanwhile
                    loop.call_soon_threadsafe(finish)

        # A daemon thread: one that never ends must not keep the router from stopping.
        Thread(target=call, name="policy", daemon=True).start()
        return ended

    def _came_late(self, _ended: "asyncio.Future[T]") -> None:
        self._late -= 1
