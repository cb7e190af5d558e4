"""Bounds request bodies by the bytes that arrive: Content-Length may be absent or lie.

An agent's file passes through to a node without being held, and has a limit of its own.
"""

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.errors import OverloadedError, TooLargeError
from fabric.limits import BODY_BYTES_MAX, HIBERNATION_BYTES_MAX

BODIES_BYTES_MAX = 16 * BODY_BYTES_MAX  # of all requests being served, together
_PASSES_THROUGH: Final = re.compile(r"/v1/agents/[^/]+/resume")


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
        passes = _PASSES_THROUGH.fullmatch(scope["path"]) is not None
        limit_bytes = HIBERNATION_BYTES_MAX if passes else self._limit_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit_bytes:
            raise _too_large(limit_bytes)
        read_bytes = held_bytes = 0

        async def counted() -> Message:
            nonlocal read_bytes, held_bytes
            message = await receive()
            if message["type"] == "http.request":
                size_bytes = len(message.get("body", b""))
                read_bytes += size_bytes
                held_bytes += 0 if passes else size_bytes
                self._held_bytes += 0 if passes else size_bytes
                if read_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
                if self._held_bytes > BODIES_BYTES_MAX:
                    text = "too many large requests at once"
                    raise OverloadedError(text)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= held_bytes


def _too_large(limit_bytes: int) -> TooLargeError:
    message = f"the body is over the limit of {limit_bytes} bytes"
    return TooLargeError(message)
