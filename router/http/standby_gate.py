"""Requests to a router that is not the active one: sent on to that one, or answered 503.

A redirect would do for browsers alone: SDKs drop their key when the host changes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

import aiohttp
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from fabric.errors import RetryLaterError
from fabric.keys import OPERATOR_HEADER
from router.http.auth import principal_of
from router.http.errors import REQUEST_ID_HEADERS, request_id_of
from router.http.forwarded import Forwarding, target_of

# Paths that every router answers itself.
CHANGES_PATH: Final = "/internal/changes"  # at which a standby copies what the active router keeps
OWN_PATHS: Final = frozenset(
    {
        *("/health", "/healthz", "/metrics", "/openapi.json", CHANGES_PATH),
        *("/v1/router", "/v1/router/promote", "/v1/router/restart"),
    }
)
AGAIN_S: Final = 1.0
CHANGE_POLL_S: Final = 0.1
ACTIVE_WAIT_S: Final = 2.0  # for news of an active router, as after this one's start
_HOP_HEADER: Final = "x-macfabric-standby"
# Of one connection (RFC 9110, 7.6.1), or set by the forwarding router.
_OWN_HEADERS: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "authorization", "x-api-key", OPERATOR_HEADER),
        "x-request-id",
    }
)


@dataclass(frozen=True, slots=True)
class Relay:
    """Forwarding of requests from a standby to the active router."""

    is_active: Callable[[], bool]
    active_url: Callable[[], str]
    session: aiohttp.ClientSession = field(repr=False)
    forwarding: Forwarding
    server_hostname: str | None = None  # that the active router's certificate must have


class StandbyGate:
    """Middleware that lets requests in while this router is active, and forwards them otherwise."""

    def __init__(self, app: ASGIApp, relay: Relay | None) -> None:
        """Let all requests in without a `relay`."""
        self._app = app
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request here, or as the active router does."""
        relay = self._relay
        is_own = relay is None or scope["type"] != "http" or scope["path"] in OWN_PATHS
        if relay is None or is_own:
            await self._app(scope, receive, send)
            return
        await _wait_for_router(relay, scope)
        if relay.is_active():
            await self._app(scope, receive, send)
            return
        await _Exchange(relay, scope, receive, send).run()


async def _wait_for_router(relay: Relay, scope: Scope) -> None:
    """Wait a moment until a router is known to be active; not for what another one forwarded."""
    if relay.is_active() or relay.active_url() or _is_forwarded(scope):
        return
    loop = asyncio.get_running_loop()
    until_s = loop.time() + ACTIVE_WAIT_S
    # Terms arrive with heartbeats, which set no event.
    while not (relay.is_active() or relay.active_url() or loop.time() >= until_s):  # noqa: ASYNC110
        await asyncio.sleep(CHANGE_POLL_S)


def _is_forwarded(scope: Scope) -> bool:
    return any(name == _HOP_HEADER.encode() for name, _ in scope["headers"])


class _Exchange:
    """Forwarded request, and its answer."""

    def __init__(self, relay: Relay, scope: Scope, receive: Receive, send: Send) -> None:
        self._relay = relay
        self._scope = scope
        self._receive = receive
        self._send = send
        self._has_body = asyncio.Event()  # all of it was sent on
        self._has_left = False

    async def run(self) -> None:
        """Forward the request and its answer; cancel it where the client leaves."""
        asking = asyncio.create_task(self._ask())
        leaving = asyncio.create_task(self._watch())
        changing = asyncio.create_task(self._watch_routers(self._relay.active_url()))
        try:
            waits = {asking, leaving, changing}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                await self._answer(asking.result(), leaving)
            elif changing.done():  # a frozen router would never answer
                message = "another router has become the active one: send the request again"
                raise RetryLaterError(message, retry_after_s=AGAIN_S, code="no_active_router")
        finally:
            changing.cancel()
            if asking.done() and not asking.cancelled() and asking.exception() is None:
                asking.result().close()
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, changing, return_exceptions=True)

    async def _ask(self) -> aiohttp.ClientResponse:
        relay, scope = self._relay, self._scope
        url = relay.active_url()
        names = {name for name, _ in scope["headers"]}
        if not url or _is_forwarded(scope):
            message = "no router of this fabric is active at the moment: send the request again"
            raise RetryLaterError(message, retry_after_s=AGAIN_S, code="no_active_router")
        has_body = b"content-length" in names or b"transfer-encoding" in names
        if not has_body:
            self._has_body.set()
        try:
            return await relay.session.request(
                scope["method"],
                URL(url + target_of(scope), encoded=True),
                headers=self._headers(),
                data=self._body() if has_body else None,
                allow_redirects=False,
                server_hostname=relay.server_hostname,
            )
        except (aiohttp.ClientError, OSError) as error:
            message = (
                f"the active router at {url} does not answer ({type(error).__name__}); another one "
                "takes over within seconds: send the request again"
            )
            raise RetryLaterError(message, retry_after_s=AGAIN_S, code="no_active_router") from None

    def _headers(self) -> list[tuple[str, str]]:
        scope = self._scope
        kept = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name.decode("latin-1") not in _OWN_HEADERS
        ]
        caller = principal_of(scope)
        proof = self._relay.forwarding.headers(caller, scope["method"], target_of(scope))
        named = (REQUEST_ID_HEADERS[0].decode(), request_id_of(scope))
        return [*kept, *proof.items(), (_HOP_HEADER, "1"), named]

    async def _body(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._has_left = True
                self._has_body.set()
                raise ConnectionResetError
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                self._has_body.set()
                return

    async def _watch_routers(self, url: str) -> None:
        """Return when the target router is no longer the active one."""
        relay = self._relay
        # Terms arrive with heartbeats, which set no event.
        while not relay.is_active() and relay.active_url() == url:  # noqa: ASYNC110
            await asyncio.sleep(CHANGE_POLL_S)

    async def _watch(self) -> None:
        """Return when the client has left."""
        await self._has_body.wait()
        while not self._has_left:
            self._has_left = (await self._receive())["type"] == "http.disconnect"

    async def _answer(self, answer: aiohttp.ClientResponse, leaving: "asyncio.Task[None]") -> None:
        headers = [
            (name.lower(), value)
            for name, value in answer.raw_headers
            if name.decode("latin-1").lower() not in _OWN_HEADERS
        ]
        start = {"type": "http.response.start", "status": answer.status, "headers": headers}
        await self._send(start)
        try:
            async for chunk in answer.content.iter_any():
                if leaving.done():
                    return
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (aiohttp.ClientError, OSError):
            return  # an answer that breaks off here breaks off for the client, too
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
