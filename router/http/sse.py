"""Server-sent events: frames, and a response that closes its source whenever it ends."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from fabric.errors import FabricError
from fabric.hosting.guarded_connection import is_closing
from router.http.errors import ErrorDialect, unknown_error
from router.limits import STREAM_SILENCE_S

COMMENT: Final = b": keep-alive\n\n"
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
_MARK: Final = "\0text\0"  # stands for the text of a `TextFrames`


def frame(value: Any, event: str | None = None, number: str | None = None) -> bytes:
    """Encode one event; escaped, so that half a surrogate pair stays valid JSON.

    A client that reconnects sends the `number` of the last event that it has seen.
    """
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    seen = b"" if number is None else b"id: " + number.encode() + b"\n"
    return name + seen + b"data: " + _ENCODER.encode(value).encode() + b"\n\n"


class TextFrames:
    """Frames that differ in one text only: all else is encoded once, not for each token."""

    def __init__(self, build: Callable[[str], bytes]) -> None:
        """Encode what surrounds the text, which is the last of its kind in `build`'s frame."""
        self._before, mark, self._after = build(_MARK).rpartition(_ENCODER.encode(_MARK).encode())
        assert mark, "the frame holds the text"

    def frame(self, text: str) -> bytes:
        """Encode the frame of one text."""
        return self._before + _ENCODER.encode(text).encode() + self._after


def idle_frame(idle: bytes, progress: object) -> bytes:
    """Return an idle frame with the progress as a comment, which clients' parsers skip."""
    if progress is None:
        return idle
    comment = f": {progress}\n".encode()
    return comment + (b"\n" if idle == COMMENT else idle)


async def guarded(
    frames: AsyncGenerator[bytes, None], dialect: ErrorDialect
) -> AsyncGenerator[bytes, None]:
    """Yield frames; an error becomes the last one, since the status has been sent."""

    def last(error: FabricError) -> bytes:
        answer = dialect.error(error)
        return frame(answer.body, answer.event)

    async with aclosing(frames):
        try:
            async for piece in frames:
                yield piece
        except FabricError as error:
            yield last(error)
        except Exception as error:  # noqa: BLE001 - the client must learn of any error
            yield last(unknown_error(error))


class EventStream(StreamingResponse):
    """Response of frames that closes their source at once when the client disconnects."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]],
        dialect: ErrorDialect,
        idle: bytes = COMMENT,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Send `idle` and the progress whenever nothing else was sent for a while."""
        self._idle = lambda: idle_frame(idle, progress())
        self._frames = guarded(frames, dialect)
        self._close = close
        super().__init__(
            self._frames,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
            media_type="text/event-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all frames, until the client disconnects."""
        silence = _Silence(scope, send, self._idle)
        try:
            await super().__call__(scope, receive, silence.send)
        finally:
            silence.end()
            await self._frames.aclose()
            # `aclose` of a generator that never started does not close its source.
            await self._close()


class _Silence:
    """Keep-alive of a stream: sends idle frames, so that no client or proxy gives up on it."""

    def __init__(self, scope: Scope, send: Send, idle: Callable[[], bytes]) -> None:
        self._scope = scope
        self._send_on = send
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._breaking: asyncio.Task[None] | None = None
        self._has_ended = False

    async def send(self, message: Message) -> None:
        """Send a message; the keep-alive starts with the first and ends with the last."""
        self._last_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(STREAM_SILENCE_S, self._check_idle)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.end()
        await self._send(message)

    async def _send(self, message: Message) -> None:
        if is_closing(self._scope):  # a write now would only log an error
            await asyncio.sleep(0)
        else:
            await self._send_on(message)

    def end(self) -> None:
        """Stop sending idle frames."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _check_idle(self) -> None:
        left_s = self._last_s + STREAM_SILENCE_S - self._loop.time()
        # A client that reads nothing gets no second idle frame; it is dropped elsewhere.
        if left_s <= 0 and (self._breaking is None or self._breaking.done()):
            self._breaking = self._loop.create_task(self._send_idle())
        self._timer = self._loop.call_later(max(left_s, 0) or STREAM_SILENCE_S, self._check_idle)

    async def _send_idle(self) -> None:
        if not self._has_ended:
            self._last_s = self._loop.time()
            body = self._idle()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
