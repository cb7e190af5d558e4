"""Server-sent events: frames, and a response that closes its source however it ends."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from fabric.errors import FabricError
from fabric.http_guard.guarded_connection import is_closing
from router.http.dialect import ErrorDialect
from router.http.errors import unknown_error


def frame(value: Any, event: str | None = None) -> bytes:
    """Encode one event, named or not; escaped, so that half a surrogate pair stays valid JSON."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def guarded(
    frames: AsyncGenerator[bytes, None], dialect: ErrorDialect
) -> AsyncGenerator[bytes, None]:
    """Pass frames on; an error becomes the last one, since the status is long sent."""

    def last(error: FabricError) -> bytes:
        told = dialect.error(error)
        return frame(told.body, told.event)

    async with aclosing(frames):
        try:
            async for each in frames:
                yield each
        except FabricError as error:
            yield last(error)
        except Exception as error:  # noqa: BLE001 - the client must be told in any case
            yield last(unknown_error(error))


class EventStream(StreamingResponse):
    """Streams frames; when the client goes, the source is closed at once, not by the collector."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]],
        dialect: ErrorDialect,
    ) -> None:
        self._frames = guarded(frames, dialect)
        self._close = close
        super().__init__(
            self._frames,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type="text/event-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all frames, or as many as the client waits for."""

        async def send_on(message: Message) -> None:
            if is_closing(scope):  # what is written now would only be complained about
                await asyncio.sleep(0)
            else:
                await send(message)

        try:
            await super().__call__(scope, receive, send_on)
        finally:
            await self._frames.aclose()
            # A generator that was never started has nothing to close by itself.
            await self._close()
