"""Limits of requests: their number, and the size and pace of bodies as they arrive.

Content-Length is not trusted. A prompt that fits no node's context is refused by the length of its
text as it arrives; pictures and files in base64 do not count, as no model reads them. Each tenant
has a share of the buffers. An agent's file is streamed through to a node, with limits of its own.

Only a few whole requests pass in each round of the event loop. Hundreds that arrive at once would
be parsed, placed and sent in the same rounds. Each of those takes a second or more; heartbeats wait
as long, and live nodes count as silent.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fabric.errors import OverloadedError, RejectedError, TooLargeError
from fabric.fair_share import FairShare
from fabric.hosting.pace import Pace
from fabric.limits import (
    BODY_BYTES_MAX,
    HIBERNATION_BYTES_MAX,
    HIBERNATION_BYTES_PER_S_MIN,
    HIBERNATION_GRACE_S,
)
from router.fair_queue import FairQueue
from router.http.auth import owner_of
from router.limits import (
    BASE64_BLOCK_BYTES,
    BASE64_CHARS_MIN,
    BODIES_ARRIVING_BYTES_MAX,
    BODIES_BYTES_MAX,
    BODY_BYTES_PER_S_MIN,
    BODY_GRACE_S,
    CALL_BODY_BYTES_MAX,
    PROMPT_ESCAPES,
    PROMPT_FRAME_BYTES,
    REQUESTS_MAX,
    REQUESTS_PER_ROUND_MAX,
)

_NO_CALLS: Final[Mapping[str, int]] = MappingProxyType({})
_BASE64: Final = (
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=\\"  # and escapes
)
_PASSES_THROUGH: Final = re.compile(r"/v1/agents/[^/]+/resume")


@dataclass(slots=True)
class _Gauge:
    """Size of one body as it arrives."""

    limit_bytes: int
    text_bytes_max: int | None = None  # of the longest prompt that fits a context
    read_bytes: int = 0
    other_bytes: int = 0  # upper bound of those that are escapes or base64, and not text

    def declare(self, size_bytes: int) -> None:
        """Raise TooLargeError if a body of this size is too long regardless of its content."""
        if size_bytes > self.limit_bytes:
            message = f"the body is over the limit of {self.limit_bytes} bytes"
            raise TooLargeError(message)

    def feed(self, part: bytes) -> None:
        """Count one more part; raise RejectedError once the body is too long."""
        self.read_bytes += len(part)
        self.declare(self.read_bytes)
        if self.text_bytes_max is not None:
            # An upper bound: an escaped backslash may precede a "u".
            long_count = part.count(b"\\u")
            self.other_bytes += part.count(b"\\") + (PROMPT_ESCAPES - 2) * long_count
            self.other_bytes += _base64_bytes(part)
            self._require_fitting(self.read_bytes - self.other_bytes - PROMPT_FRAME_BYTES)

    def _require_fitting(self, text_bytes: int) -> None:
        assert self.text_bytes_max is not None, "only prompts are measured"
        if text_bytes > self.text_bytes_max:
            message = (
                "this model's maximum context length is exceeded: the prompt has at least "
                f"{text_bytes} bytes, and no context here holds more than {self.text_bytes_max}: "
                "shorten the conversation"
            )
            raise RejectedError(message, code="context_length_exceeded", param="messages")


def _base64_bytes(part: bytes) -> int:
    """Return an upper bound of the bytes of base64: blocks of many of its characters only."""
    total = 0
    for start in range(0, len(part), BASE64_BLOCK_BYTES):
        block = part[start : start + BASE64_BLOCK_BYTES]
        if not block.translate(None, _BASE64) and len(set(block)) >= BASE64_CHARS_MIN:
            total += len(block)
    return total


class RoundPacer:
    """Turnstile that lets a few requests pass in each round, taking turns between owners."""

    def __init__(self, per_round_max: int) -> None:
        self._per_round_max = per_round_max
        self._passed_count = 0  # in this round
        self._waiting = FairQueue[asyncio.Future[None]]()
        self._is_scheduled = False

    async def wait(self, owner: str) -> None:
        """Return once it is the turn of a request of `owner`."""
        if not self._waiting and self._passed_count < self._per_round_max:
            self._passed_count += 1
            self._schedule()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(owner, turn, 1.0)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(owner, turn)
            raise

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_scheduled = False
        self._passed_count = 0
        while self._passed_count < self._per_round_max:
            turn = self._waiting.next()
            if turn is None:
                break
            if not turn.done():
                turn.set_result(None)
                self._passed_count += 1
        if self._passed_count:
            self._schedule()


class BodyLimit:
    """Middleware that limits requests and bodies by tenant."""

    def __init__(
        self,
        app: ASGIApp,
        prompt_paths: Collection[str],
        prompt_bytes_max: Callable[[], int],
        call_bytes_max: Mapping[str, int] = _NO_CALLS,
        retry_after_s: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        """Use `prompt_bytes_max` for the text that the longest context of any node holds.

        `call_bytes_max` has limits of single paths, instead of the common one. `retry_after_s`
        returns the seconds after which an account with too many requests may send more.
        """
        self._app = app
        self._prompt_paths = prompt_paths
        self._prompt_bytes_max = prompt_bytes_max
        self._call_bytes_max = call_bytes_max
        self._requests = FairShare[str](REQUESTS_MAX)
        self._arriving = FairShare[str](BODIES_ARRIVING_BYTES_MAX)
        self._held = FairShare[str](BODIES_BYTES_MAX)
        self._pacer = RoundPacer(REQUESTS_PER_ROUND_MAX)
        self._retry_after_s = retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application on a limited body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner = owner_of(scope)
        if not self._requests.take(owner):
            text = "too many requests at once"
            raise OverloadedError(text, retry_after_s=self._retry_after_s(owner))
        try:
            await self._count_body(owner, scope, receive, send)
        finally:
            self._requests.give(owner)

    async def _count_body(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        passes = _PASSES_THROUGH.fullmatch(scope["path"]) is not None
        gauge = self._gauge_of(scope["path"])
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit():
            gauge.declare(int(declared[:20]))
        pace = Pace(BODY_BYTES_PER_S_MIN, BODY_GRACE_S)
        if passes:
            pace = Pace(HIBERNATION_BYTES_PER_S_MIN, HIBERNATION_GRACE_S)
        arriving_bytes = held_bytes = 0
        is_whole = False

        async def counted() -> Message:
            nonlocal arriving_bytes, held_bytes, is_whole
            if is_whole:  # only a disconnect can follow
                return await receive()
            message = await _receive_paced(receive, pace)
            if message["type"] != "http.request":
                return message
            part = message.get("body", b"")
            size_bytes = len(part)
            is_whole = not message.get("more_body", False)
            gauge.feed(part)
            if not passes:
                if not is_whole:
                    arriving_bytes += self._take(self._arriving, owner, size_bytes)
                held_bytes += self._take(self._held, owner, size_bytes)
                if is_whole:
                    self._arriving.give(owner, arriving_bytes)
                    arriving_bytes = 0
                    await self._pacer.wait(owner)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._arriving.give(owner, arriving_bytes)
            self._held.give(owner, held_bytes)

    def _gauge_of(self, path: str) -> _Gauge:
        if _PASSES_THROUGH.fullmatch(path):
            return _Gauge(HIBERNATION_BYTES_MAX)
        if path not in self._prompt_paths:
            return _Gauge(self._call_bytes_max.get(path, CALL_BODY_BYTES_MAX))
        return _Gauge(BODY_BYTES_MAX, self._prompt_bytes_max())

    def _take(self, share: FairShare[str], owner: str, size_bytes: int) -> int:
        if not share.take(owner, size_bytes):
            text = "too many large requests at once"
            raise OverloadedError(text, retry_after_s=self._retry_after_s(owner))
        return size_bytes


async def _receive_paced(receive: Receive, pace: Pace) -> Message:
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    try:
        async with asyncio.timeout(pace.left_s):
            message = await receive()
    except TimeoutError:
        raise pace.stalled_error() from None
    pace.add(len(message.get("body", b"")), now_s() - began_s)
    return message
