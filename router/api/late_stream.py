"""A stream whose turn waits for a node that has not joined, before its headers can be known.

admitted soon     headers say which node answers, and how much it reused
still waiting     the stream begins without those headers, and comments name the awaited nodes;
                  once the turn is admitted, comments have the headers
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fabric.errors import FabricError
from router.limits import STREAM_SILENCE_S
from router.turns.owner_wait import AwaitedNodes

T = TypeVar("T")
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Streamed:
    """The response parts of a turn that a node has admitted."""

    frames: AsyncGenerator[bytes, None]
    headers: Mapping[str, str]
    close: Callable[[], Awaitable[None]]
    progress: Callable[[], object]


@dataclass(slots=True)
class Opening(Generic[T]):
    """A turn on its way to a node."""

    work: Coroutine[Any, Any, T]
    waiting: AwaitedNodes
    streamed: Callable[[T], Streamed]
    _task: asyncio.Task[T] | None = field(default=None, init=False)
    _made: Streamed | None = field(default=None, init=False)

    async def soon(self) -> Streamed | None:
        """Return the admitted turn's stream, or None where its client would wait in silence."""
        self._task = asyncio.create_task(self.work)
        patience_s = STREAM_SILENCE_S
        try:
            while not (await asyncio.wait({self._task}, timeout=patience_s))[0]:
                if self.waiting.nodes:
                    return None
                patience_s = POLL_S
        except asyncio.CancelledError:
            await self.close()
            raise
        return self._stream(self._task.result())

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Say what the turn waits for, and how it was admitted; then yield its frames."""
        assert self._task is not None, "it was begun"
        yield f": {self.progress()}\n\n".encode()
        made = self._stream(await asyncio.shield(self._task))
        yield _comments(made.headers)
        async with aclosing(made.frames) as frames:
            async for frame in frames:
                yield frame

    def progress(self) -> object:
        """Return how far the turn is: what it waits for, or how much of its prompt is computed."""
        return self._made.progress() if self._made is not None else self.waiting

    async def close(self) -> None:
        """Cancel the turn, wherever it is by now."""
        assert self._task is not None, "it was begun"
        self._task.cancel()
        with suppress(asyncio.CancelledError, FabricError):
            made = self._made or self._stream(await self._task)
            await made.close()

    def _stream(self, opened: T) -> Streamed:
        self._made = self.streamed(opened)
        return self._made


def _comments(headers: Mapping[str, str]) -> bytes:
    """Return headers as comments of an event stream, which its readers skip."""
    lines = [f": {name}: {value}\n" for name, value in headers.items()]
    return f"{''.join(lines)}\n".encode()
