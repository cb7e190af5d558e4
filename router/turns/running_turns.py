"""Turns that run in this router, and their end when it stops."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from fabric.errors import RetryLaterError
from router.limits import STOPPING_RETRY_S

T = TypeVar("T")


def stopping() -> RetryLaterError:
    """Return the error of a turn that a stopping router refuses or cancels."""
    message = "the router is stopping; send the request again"
    return RetryLaterError(message, retry_after_s=STOPPING_RETRY_S, code="stopping")


class Breaker:
    """Switch that cancels one turn, wherever it waits for its node."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: asyncio.Task[object] | None = None

    def open(self) -> None:
        """Cancel the turn: the current wait, or the next one, raises `stopping()`."""
        if not self.is_open:
            self.is_open = True
            if self._waiting is not None:
                self._waiting.cancel()

    async def wait(self, work: Awaitable[T]) -> T:
        """Await `work`; raise `stopping()` if the turn is cancelled meanwhile."""
        task = self._waiting = asyncio.current_task()
        assert task is not None, "a turn runs in a task"
        try:
            if self.is_open:  # cancels `work`, which must be awaited in any case
                task.cancel()
            return await work
        except asyncio.CancelledError:
            if self.is_open and task.uncancel() == 0:
                raise stopping() from None
            raise
        finally:
            self._waiting = None


class RunningTurns:
    """All turns of a router, from their request to their last event."""

    def __init__(self) -> None:
        self._breakers: set[Breaker] = set()
        self._is_refusing = False

    def __len__(self) -> int:
        return len(self._breakers)

    @property
    def is_refusing(self) -> bool:
        return self._is_refusing

    def begin(self) -> Breaker:
        """Add a turn; raise `stopping()` if the router is stopping."""
        if self._is_refusing:
            raise stopping()
        breaker = Breaker()
        self._breakers.add(breaker)
        return breaker

    def discard(self, breaker: Breaker) -> None:
        """Remove a turn that has ended."""
        self._breakers.discard(breaker)

    def refuse(self) -> None:
        """Refuse turns from now on."""
        self._is_refusing = True

    def break_off(self) -> None:
        """Cancel all turns; their nodes keep what they have computed."""
        for breaker in list(self._breakers):
            breaker.open()
