"""Streams that start while their turn still waits for a node to join.

admitted soon     headers name the node that answers, and how much it reused
still waiting     the stream starts without those headers, and comments name the awaited nodes;
                  once the turn is admitted, comments repeat the headers
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
class StreamParts:
    """Response of a turn that a node has admitted."""

    frames: AsyncGenerator[bytes, None]
    headers: Mapping[str, str]
    close: Callable[[], Awaitable[None]]
    progress: Callable[[], object]


@dataclass(slots=True)
class PendingTurn(Generic[T]):
    """Turn on its way to a node, and its stream."""

    work: Coroutine[Any, Any, T]
    waiting: AwaitedNodes
    streamed: Callable[[T], StreamParts]
    _task: asyncio.Task[T] | None = field(default=None, init=False)
    _parts: StreamParts | None = field(default=None, init=False)

    async def open_if_ready(self) -> StreamParts | None:
        """Return the stream once the turn is admitted, or None if that has to wait for a node."""
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
        """Yield comments until the turn is admitted, and then its frames."""
        assert self._task is not None, "started"
        yield f": {self.progress()}\n\n".encode()
        parts = self._stream(await asyncio.shield(self._task))
        yield _comments(parts.headers)
        async with aclosing(parts.frames) as frames:
            async for frame in frames:
                yield frame

    def progress(self) -> object:
        """Return the turn's progress: why it waits, or the computed part of its prompt."""
        return self._parts.progress() if self._parts is not None else self.waiting

    async def close(self) -> None:
        """Cancel the turn in any state."""
        assert self._task is not None, "started"
        self._task.cancel()
        with suppress(asyncio.CancelledError, FabricError):
            parts = self._parts or self._stream(await self._task)
            await parts.close()

    def _stream(self, opened: T) -> StreamParts:
        self._parts = self.streamed(opened)
        return self._parts


def _comments(headers: Mapping[str, str]) -> bytes:
    """Return headers as comments of an event stream, which its readers skip."""
    lines = [f": {name}: {value}\n" for name, value in headers.items()]
    return f"{''.join(lines)}\n".encode()
