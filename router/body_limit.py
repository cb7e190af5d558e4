"""Bounds request bodies by the bytes that arrive: Content-Length may be absent or lie."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.errors import OverloadedError, TooLargeError
from fabric.limits import BODY_BYTES_MAX

BODIES_BYTES_MAX = 16 * BODY_BYTES_MAX  # of all requests being served, together


class BodyLimit:
    """Counts every body while it is read, and all of them together."""

    def __init__(self, app: ASGIApp, limit_bytes: int = BODY_BYTES_MAX) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application on a counted body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._limit_bytes:
            raise self._too_large()
        read_bytes = 0

        async def counted() -> Message:
            nonlocal read_bytes
            message = await receive()
            if message["type"] == "http.request":
                size_bytes = len(message.get("body", b""))
                read_bytes += size_bytes
                self._held_bytes += size_bytes
                if read_bytes > self._limit_bytes:
                    raise self._too_large()
                if self._held_bytes > BODIES_BYTES_MAX:
                    text = "too many large requests at once"
                    raise OverloadedError(text)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= read_bytes

    def _too_large(self) -> TooLargeError:
        message = f"the body is over the limit of {self._limit_bytes} bytes"
        return TooLargeError(message)
