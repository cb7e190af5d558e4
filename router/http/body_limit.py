"""Bounds requests and their bodies by what arrives, and by how fast; Content-Length may lie.

Each tenant has a share of what all may hold. An agent's file passes through to a node without
being held, and has limits of its own.
"""

import asyncio
import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.errors import OverloadedError, TooLargeError
from fabric.fair_share import FairShare
from fabric.http_guard.pace import Pace
from fabric.limits import (
    BODIES_ARRIVING_BYTES_MAX,
    BODIES_BYTES_MAX,
    BODY_BYTES_MAX,
    BODY_BYTES_PER_S_MIN,
    BODY_GRACE_S,
    HIBERNATION_BYTES_MAX,
    HIBERNATION_BYTES_PER_S_MIN,
    HIBERNATION_GRACE_S,
    REQUESTS_MAX,
)
from router.http.auth import owner_of

_PASSES_THROUGH: Final = re.compile(r"/v1/agents/[^/]+/resume")


class BodyLimit:
    """Counts requests and bodies by tenant while they are served."""

    def __init__(self, app: ASGIApp, limit_bytes: int = BODY_BYTES_MAX) -> None:
        self._app = app
        self._limit_bytes = limit_bytes
        self._requests = FairShare[str](REQUESTS_MAX)
        self._arriving = FairShare[str](BODIES_ARRIVING_BYTES_MAX)
        self._held = FairShare[str](BODIES_BYTES_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application on a counted body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner = owner_of(scope)
        if not self._requests.take(owner):
            text = "too many requests at once"
            raise OverloadedError(text)
        try:
            await self._counted(owner, scope, receive, send)
        finally:
            self._requests.give(owner)

    async def _counted(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        passes = _PASSES_THROUGH.fullmatch(scope["path"]) is not None
        limit_bytes = HIBERNATION_BYTES_MAX if passes else self._limit_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit_bytes:
            raise _too_large(limit_bytes)
        pace = Pace(BODY_BYTES_PER_S_MIN, BODY_GRACE_S)
        if passes:
            pace = Pace(HIBERNATION_BYTES_PER_S_MIN, HIBERNATION_GRACE_S)
        read_bytes = arriving_bytes = held_bytes = 0
        is_whole = False

        async def counted() -> Message:
            nonlocal read_bytes, arriving_bytes, held_bytes, is_whole
            if is_whole:  # all that can come is that the client leaves
                return await receive()
            message = await _paced(receive, pace)
            if message["type"] != "http.request":
                return message
            size_bytes = len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            read_bytes += size_bytes
            if read_bytes > limit_bytes:
                raise _too_large(limit_bytes)
            if not passes:
                if not is_whole:
                    arriving_bytes += self._take(self._arriving, owner, size_bytes)
                held_bytes += self._take(self._held, owner, size_bytes)
                if is_whole:
                    self._arriving.give(owner, arriving_bytes)
                    arriving_bytes = 0
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._arriving.give(owner, arriving_bytes)
            self._held.give(owner, held_bytes)

    def _take(self, share: FairShare[str], owner: str, size_bytes: int) -> int:
        if not share.take(owner, size_bytes):
            text = "too many large requests at once"
            raise OverloadedError(text)
        return size_bytes


async def _paced(receive: Receive, pace: Pace) -> Message:
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    try:
        async with asyncio.timeout(pace.left_s):
            message = await receive()
    except TimeoutError:
        raise pace.stalled() from None
    pace.came(len(message.get("body", b"")), now_s() - began_s)
    return message


def _too_large(limit_bytes: int) -> TooLargeError:
    message = f"the body is over the limit of {limit_bytes} bytes"
    return TooLargeError(message)
