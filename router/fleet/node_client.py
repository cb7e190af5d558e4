"""Client of one node: control calls over any transport, turns over HTTP.

A call without an answer may or may not have been executed. Only HTTP calls are retried, and only if
a kept-alive connection broke before the answer (`node_http.py`): such calls are idempotent, and a
node cancels a turn whose connection broke.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
)
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, Self, TypeVar

import aiohttp

from fabric.codec import dump_json, from_newer, parse_json
from fabric.control.calls import (
    CONTROL_PATH,
    NO_ORIGIN,
    NODE_HEADER,
    CallOrigin,
    CallRoute,
    CallSpec,
    ErrorReply,
    decode_reply,
    encode_call,
    spec_of,
)
from fabric.control.term_calls import TERM_HEADER
from fabric.control.versions import BAD_NODE_ANSWER
from fabric.errors import (
    ConflictError,
    FabricError,
    NotFoundError,
    OldRouterError,
    OverloadedError,
    RejectedError,
    RetryElsewhereError,
    RetryLaterError,
    StaleEpochError,
    StartFailedError,
    TooLargeError,
)
from fabric.hosting.turn_context import call_origin
from fabric.ids import NodeName
from fabric.limits import CONTROL_BYTES_MAX, FRAME_BYTES_MAX
from fabric.turn.generation import (
    CLUSTER_HEADER,
    GENERATE_PATH,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    HandedOver,
    decode_event,
)
from router.fleet.node_http import Body, NodeHttp, Use
from router.fleet.terms import SOLE_ROUTER, TermAuthority
from router.large_work import run_sized, weigh

_REJECTED: dict[int, type[RejectedError]] = {
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: ConflictError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: TooLargeError,
}
_RETRY_AFTER_S = 1.0
_CLIENT_ERRORS = range(400, 500)


def remote_error(reply: ErrorReply) -> FabricError:
    """Return the FabricError for a node's error; callers react to its class."""
    status, code, message = reply.status, reply.code, reply.message
    wait_s = _RETRY_AFTER_S if reply.retry_after_s is None else reply.retry_after_s
    if status == HTTPStatus.UNAUTHORIZED:
        # The router's own secret was refused: a fault of the cluster, not of the client.
        text = "the node refused this router's cluster secret"
        return FabricError(text, code="cluster_secret_refused")
    if status == HTTPStatus.MISDIRECTED_REQUEST:
        stale = code == StaleEpochError.code
        return (StaleEpochError if stale else RetryElsewhereError)(message, code=code)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return OverloadedError(message, retry_after_s=wait_s, code=code)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        kind = StartFailedError if code == StartFailedError.code else RetryLaterError
        return kind(message, retry_after_s=wait_s, code=code)
    if code == OldRouterError.code:  # another one is active
        text = f"this router is not the active one: {message}"
        return RetryLaterError(text, retry_after_s=wait_s, code=code)
    if status in _CLIENT_ERRORS:
        return _REJECTED.get(status, RejectedError)(message, code=code, param=reply.param)
    error = FabricError(message, code=code)
    if status == HTTPStatus.INSUFFICIENT_STORAGE:  # the node's disk is full or refuses writes
        error.status = HTTPStatus.INSUFFICIENT_STORAGE
    return error


T = TypeVar("T")
Reply = TypeVar("Reply")

WATCH_S = 0.5  # how often a silent node's lease is checked
READY_WAIT_S = 0.5  # maximum wait for connections that are opened ahead


class NodeLostError(RetryElsewhereError):
    """Node that did not answer, or fell silent before the end of its answer."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "node_lost"

    def __init__(self, message: str, node: NodeName, *, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.node = node


# Sends one encoded control call to one node, and returns its reply; raises NodeLostError.
ControlTransport = Callable[[bytes], Coroutine[Any, Any, bytes]]


class NodeLink:
    """Link to a node over an injected control transport and the node's HTTP server."""

    def __init__(
        self,
        name: NodeName,
        transport: ControlTransport,
        http: NodeHttp,
        secret: str,
        is_lost: Callable[[], bool],
        *,
        uses_http: bool = True,
        proven_as: str | None = None,
        terms: TermAuthority = SOLE_ROUTER,
    ) -> None:
        """Make calls over `transport`, or if `uses_http` over HTTP where the call table says so.

        `proven_as` is the name that the node's certificate must have before anything is sent.
        Calls that change the fabric are sent only if `terms` permit.
        """
        self._terms = terms
        self.name = name
        self.http_url = ""  # known from the node's heartbeat
        self.reads_origins = False  # it reads calls that name their turn; known from its heartbeat
        self._transport = transport
        self._http = http
        self._secret = secret
        self._is_lost = is_lost
        self._uses_http = uses_http
        self._proven_as = proven_as

    async def call(
        self, message: object, kind: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        """Make one control call; raise the node's FabricError, or NodeLostError.

        `fabric.control.calls` determines how it is made; `timeout_s` overrides its timeout.
        """
        spec = spec_of(type(message))
        assert spec.reply is kind, "callers know the replies to their calls"
        limit_s = spec.timeout_s if timeout_s is None else timeout_s
        raw_call = encode_call(message, origin=self._origin(spec))
        try:
            async with asyncio.timeout(limit_s):
                by_http = self._uses_http and spec.route is CallRoute.HTTP and self.http_url
                work = (self._over_http if by_http else self._transport)(raw_call)
                raw = await (work if spec.to_lost else self._unless_lost(work))
        except TimeoutError:
            text = f"{self.name} did not answer {type(message).__name__} in {limit_s:g} s"
            raise NodeLostError(text, self.name, code="node_timeout") from None
        try:
            reply = decode_reply(kind, raw)
        except RejectedError as error:
            text = f"{self.name} sent an invalid reply to {type(message).__name__}: {error.message}"
            raise FabricError(text, code=BAD_NODE_ANSWER) from None
        if isinstance(reply, ErrorReply):
            self._note(reply.code)
            raise remote_error(reply)
        return reply

    def _origin(self, spec: CallSpec) -> CallOrigin:
        """Return the origin of a call; heartbeats and the like work for no turn."""
        if spec.is_open:
            return NO_ORIGIN
        term = self._terms.current()
        return call_origin(term) if self.reads_origins else CallOrigin(term)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Stream the events of a turn; closing the generator cancels it."""
        headers = {"content-type": "application/json"}
        term = self._terms.current()
        if term is not None:
            request = replace(request, term=term)
        more = [request.template_options, request.sketch]
        with self._raise_as_lost():
            size_bytes = weigh([request.messages, request.prompt, request.tools, more])
            body = await run_sized(request.tenant, size_bytes, partial(dump_json, request))
            answer = await self.post(GENERATE_PATH, body, headers, Use.STREAM)
            is_over = False
            try:
                async for line in self._lines(answer.content):
                    event = _event(line, self.name)
                    is_over = isinstance(event, (Finished, HandedOver, Failed))
                    yield event
                    if is_over:
                        return
            finally:
                (self._http.let_end if is_over else self._http.release)(answer)
        text = f"{self.name} closed the stream before the turn's last event"
        raise NodeLostError(text, self.name)

    async def post(
        self, path: str, data: Body, headers: Mapping[str, str], use: Use | None = None
    ) -> aiohttp.ClientResponse:
        """Return the node's response once its headers have arrived; raise its FabricError.

        With a `use`, the request may reuse a pooled connection, and the caller must hand the
        response back to `NodeHttp`.
        """
        address = self._address()
        term = self._terms.held()
        term_header = {} if term is None else {TERM_HEADER: str(term)}
        all_headers = {**headers, **term_header, CLUSTER_HEADER: self._secret}
        asking = asyncio.ensure_future(
            self._http.post(address, path, data, all_headers, self._proven_as, use)
        )
        with self._raise_as_lost():
            try:
                answer = await self._unless_lost(asking)
            except BaseException:
                asking.add_done_callback(self._drop)  # the response may have just arrived
                raise
            if answer.status != HTTPStatus.OK:
                try:
                    refusal = await _refusal(answer)
                    self._note(refusal.code)
                    raise refusal
                finally:
                    self._http.release(answer)  # and stop a body that is still being sent
        return answer

    def _note(self, code: str) -> None:
        if code == OldRouterError.code:
            self._terms.note_refusal()

    async def make_ready(self, *uses: Use) -> None:
        """Open connections for the given uses ahead of time, if possible.

        A new connection costs a mutual TLS handshake, as much time as a token.
        """
        if self._uses_http:
            with suppress(TimeoutError):
                async with asyncio.timeout(READY_WAIT_S):
                    await asyncio.gather(*(self._open(use) for use in uses))

    async def _open(self, use: Use) -> None:
        headers = {CLUSTER_HEADER: self._secret, NODE_HEADER: self.name}
        with suppress(FabricError, aiohttp.ClientError, OSError):
            address = self._address()
            answer = await self._http.head(address, CONTROL_PATH, headers, self._proven_as, use)
            self._http.release(answer)

    def _drop(self, asking: asyncio.Future[aiohttp.ClientResponse]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self._http.release(asking.result())

    def _address(self) -> str:
        """Return the node's address; raise NodeLostError if nothing may be sent to it."""
        if self._proven_as is not None and not self.http_url.startswith("https://"):
            text = f"{self.name} has reported no address with TLS"
            raise NodeLostError(text, self.name)
        if not self.http_url:
            text = f"{self.name} has not reported its address yet"
            raise NodeLostError(text, self.name)
        return self.http_url

    @contextmanager
    def _raise_as_lost(self) -> Iterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            text = f"the connection to {self.name} broke ({type(error).__name__})"
            raise NodeLostError(text, self.name) from error

    async def _over_http(self, raw: bytes) -> bytes:
        headers = {"content-type": "application/msgpack", NODE_HEADER: self.name}
        answer = await self.post(CONTROL_PATH, raw, headers, Use.CALL)
        return await self.read(answer, CONTROL_BYTES_MAX)

    async def read(self, answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
        """Return the body of a response to `post`, which ends here; raise FabricError."""
        body = bytearray()
        with self._raise_as_lost():
            try:
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > bytes_max:
                        message = f"an answer of {self.name} is over {bytes_max} bytes"
                        raise FabricError(message, code=BAD_NODE_ANSWER)
            finally:
                self._http.release(answer)
        return bytes(body)

    async def _lines(self, content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
        pending = b""
        with _SilenceWatch(content, self._raise_if_lost) as watch:
            while chunk := await watch.read():
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    if line:
                        yield line
                if len(pending) > FRAME_BYTES_MAX:
                    message = f"an event of {self.name} is over {FRAME_BYTES_MAX} bytes"
                    raise FabricError(message, code="bad_event")

    async def _unless_lost(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
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
            raise NodeLostError(message, self.name)


class _SilenceWatch:
    """Reads of a stream, broken off when its node is lost while one waits.

    One timer for the whole stream: a timeout for each read costs as much as the read.
    """

    def __init__(self, content: aiohttp.StreamReader, raise_if_lost: Callable[[], None]) -> None:
        self._content = content
        self._raise_if_lost = raise_if_lost
        self._loop = asyncio.get_running_loop()
        self._is_waiting = False
        self._was_waiting = False  # for the same read, at the last check

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(WATCH_S, self._check)
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    async def read(self) -> bytes:
        """Return what has arrived; empty at the end. Raise NodeLostError."""
        self._is_waiting, self._was_waiting = True, False
        try:
            return await self._content.readany()
        finally:
            self._is_waiting = False

    def _check(self) -> None:
        if self._is_waiting and self._was_waiting:
            try:
                self._raise_if_lost()
            except NodeLostError as error:
                self._content.set_exception(error)
                return
        self._was_waiting = self._is_waiting
        self._timer = self._loop.call_later(WATCH_S, self._check)


def _event(line: bytes, node: NodeName) -> Event:
    try:
        return decode_event(line)
    except RejectedError as error:
        text = f"{node} sent no valid event: {error.message}"
        raise FabricError(text, code="bad_event") from None


async def _refusal(response: aiohttp.ClientResponse) -> FabricError:
    """Return the FabricError of a node's HTTP error response."""
    raw, status = await response.content.read(FRAME_BYTES_MAX), response.status
    try:
        error = {**parse_json(raw)["error"], "status": status}
        return remote_error(from_newer(ErrorReply, error))
    except (RejectedError, KeyError, TypeError):
        text = f"the node answered HTTP {status} without a known error body"
        return remote_error(ErrorReply(status, BAD_NODE_ANSWER, text))
