"""How the router reaches one node: control calls over any transport, tokens over HTTP.

A call that is not answered may or may not have been executed; nothing here sends it twice.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import aiohttp

from fabric.codec import dump_json, parse_json
from fabric.control import (
    Describe,
    EraseAgent,
    ErrorReply,
    ShareErasures,
    decode_reply,
    encode_call,
)
from fabric.errors import FabricError, RejectedError, RetryElsewhereError
from fabric.generation import (
    CLUSTER_HEADER,
    GENERATE_PATH,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    HandedOver,
    decode_event,
)
from fabric.hasty_calls import HASTY, HASTY_PATH, NODE_HEADER
from fabric.ids import NodeName
from fabric.limits import BODY_BYTES_MAX, CONTROL_TIMEOUT_S, FRAME_BYTES_MAX
from router.remote_errors import remote_error

T = TypeVar("T")
Reply = TypeVar("Reply")

_RETURNING = (Describe, EraseAgent, ShareErasures)
WATCH_S = 0.5  # how often a silent node's lease is looked at
CONNECT_TIMEOUT_S = 2.0


class NodeLostError(RetryElsewhereError):
    """The node did not answer, or fell silent before the end."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "node_lost"


class ControlTransport(Protocol):
    """Carries one encoded control call to one node and its reply back."""

    async def __call__(self, raw: bytes) -> bytes:
        """Send once; raise NodeLostError when no reply can come any more."""
        ...


class NodeLink(Protocol):
    """One node, as the rest of the router sees it."""

    name: NodeName
    http_url: str

    async def call(
        self, message: object, kind: type[Reply], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Reply:
        """Make one control call; raise the node's FabricError, or NodeLostError."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream one turn's events; closing the generator cancels the turn."""
        ...

    async def post(
        self, path: str, data: bytes | AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Return the node's answer as soon as it begins; raise the FabricError it stands for."""
        ...


def open_session() -> aiohttp.ClientSession:
    """Make the HTTP client that all links share; it never gives up on a slow prefill."""
    return aiohttp.ClientSession(
        # A kept connection may be half dead after a node's restart: a new one costs 0.2 ms.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
    )


class HttpNodeLink:
    """A link over an injected control transport and the node's HTTP server."""

    def __init__(
        self,
        name: NodeName,
        transport: ControlTransport,
        session: aiohttp.ClientSession,
        secret: str,
        is_lost: Callable[[], bool],
        *,
        hastens: bool = True,
    ) -> None:
        """Make calls over `transport`; if it `hastens`, those that a client waits for by HTTP."""
        self.name = name
        self.http_url = ""  # the node's beat tells it
        self._transport = transport
        self._session = session
        self._secret = secret
        self._is_lost = is_lost
        self._hastens = hastens

    async def call(
        self, message: object, kind: type[Reply], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> Reply:
        """Make one control call; raise the node's FabricError, or NodeLostError."""
        try:
            async with asyncio.timeout(timeout_s):
                in_haste = self._hastens and isinstance(message, HASTY) and self.http_url
                carry = self._over_http if in_haste else self._transport
                work = carry(encode_call(message))
                # The calls by which a lost node comes back do not end because it is lost.
                raw = await (work if isinstance(message, _RETURNING) else self._unless_lost(work))
        except TimeoutError:
            text = f"{self.name} did not answer {type(message).__name__} in {timeout_s:g} s"
            raise NodeLostError(text, code="node_timeout") from None
        try:
            reply = decode_reply(kind, raw)
        except RejectedError as error:
            text = f"{self.name} answered {type(message).__name__} wrongly: {error.message}"
            raise FabricError(text, code="bad_node_answer") from None
        if isinstance(reply, ErrorReply):
            raise remote_error(
                reply.status,
                reply.code,
                reply.message,
                param=reply.param,
                retry_after_s=reply.retry_after_s,
            )
        return reply

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream one turn's events; closing the generator cancels the turn."""
        headers = {"content-type": "application/json"}
        with self._breaking():
            async with await self.post(GENERATE_PATH, dump_json(request), headers) as response:
                async for line in self._lines(response.content):
                    event = _event(line, self.name)
                    yield event
                    if isinstance(event, (Finished, HandedOver, Failed)):
                        return
        text = f"{self.name} ended the stream without a last event"
        raise NodeLostError(text)

    async def post(
        self, path: str, data: bytes | AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Return the node's answer as soon as it begins; raise the FabricError it stands for."""
        if not self.http_url:
            text = f"{self.name} has not told its address yet"
            raise NodeLostError(text)
        with self._breaking():
            response = await self._unless_lost(self._post(path, data, headers))
            if response.status != HTTPStatus.OK:
                try:
                    raise await _refusal(response)
                finally:
                    response.close()  # also what is still being sent
        return response

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Take a connection that breaks for the loss of the node."""
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            text = f"the connection to {self.name} broke ({type(error).__name__})"
            raise NodeLostError(text) from error

    async def _post(
        self, path: str, data: bytes | AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        return await self._session.post(
            self.http_url + path,
            data=data,
            headers={**headers, CLUSTER_HEADER: self._secret},
            allow_redirects=False,
        )

    async def _over_http(self, raw: bytes) -> bytes:
        """Make one control call on a connection of its own, on which nothing is sent twice."""
        headers = {"content-type": "application/msgpack", NODE_HEADER: self.name}
        reply = bytearray()
        with self._breaking():
            async with await self.post(HASTY_PATH, raw, headers) as response:
                async for chunk in response.content.iter_any():
                    reply += chunk
                    if len(reply) > BODY_BYTES_MAX:
                        message = f"an answer of {self.name} is over {BODY_BYTES_MAX} bytes"
                        raise FabricError(message, code="bad_node_answer")
        return bytes(reply)

    async def _lines(self, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        pending = b""
        while True:
            try:
                # readany loses nothing when the timeout interrupts it; readline would.
                async with asyncio.timeout(WATCH_S):
                    chunk = await content.readany()
            except TimeoutError:
                self._raise_if_lost()
                continue
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield line
            if len(pending) > FRAME_BYTES_MAX:
                message = f"an event of {self.name} is over {FRAME_BYTES_MAX} bytes"
                raise FabricError(message, code="bad_event")

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=WATCH_S)
                if not task.done():
                    self._raise_if_lost()
            return task.result()
        finally:
            task.cancel()

    def _raise_if_lost(self) -> None:
        if self._is_lost():
            message = f"{self.name} has been silent for longer than its lease"
            raise NodeLostError(message)


def _event(line: bytes, node: NodeName) -> Event:
    try:
        return decode_event(line)
    except RejectedError as error:
        text = f"{node} sent no valid event: {error.message}"
        raise FabricError(text, code="bad_event") from None


async def _refusal(response: aiohttp.ClientResponse) -> FabricError:
    """Turn a node's HTTP error body into the FabricError it stands for."""
    raw = await response.content.read(FRAME_BYTES_MAX)
    try:
        body = parse_json(raw)
        error = body["error"]
        code, message = str(error["code"]), str(error["message"])
        param, wait = error.get("param"), error.get("retry_after_s")
    except (RejectedError, KeyError, TypeError, AttributeError):
        text = f"the node answered HTTP {response.status} without a known error body"
        return remote_error(response.status, "bad_node_answer", text)
    return remote_error(
        response.status,
        code,
        message,
        param=param if isinstance(param, str) else None,
        retry_after_s=float(wait) if isinstance(wait, (int, float)) else None,
    )
