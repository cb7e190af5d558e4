"""HTTP connections of the router to nodes, kept open for requests that clients wait for.

A new connection costs both ends a handshake, 5.6 ms of CPU time together; a call on a kept one
takes 0.6 ms in all. A kept connection may turn out closed: a request without an answer is then sent
again on a new one, so kept connections carry only requests that may arrive twice.
"""

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import Any, Final, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

import aiohttp
from aiohttp.connector import Connection

from fabric.limits import KIB
from router.limits import (
    CONNECTION_IDLE_S,
    CONNECTION_LIFE_S,
    HANDSHAKES_PER_NODE_MAX,
    TURNS_UNANSWERED_MAX,
)

CONNECT_TIMEOUT_S = 2.0
END_WAIT_S = 1.0  # between an answer's last event and its end
LARGE_BODY_BYTES: Final = 64 * KIB

Body = bytes | AsyncIterator[bytes]
_Ask = Callable[[aiohttp.ClientSession], Awaitable[aiohttp.ClientResponse]]


class Use(Enum):
    """Purpose of a connection, and how many of them one node's address gets."""

    CALL = 4  # the number of simultaneous moves off a node, plus one
    STREAM = 32  # the number of turns that a node computes at a time


@dataclass(slots=True)
class _ConnectionChoice:
    """Whether a request needs a new connection, and whether it got a kept one."""

    is_new_only: bool
    was_kept: bool = False


_CHOICE: ContextVar[_ConnectionChoice] = ContextVar("choice")


class _Handshakes:
    """Bound on the connections to one address that are opened at a time."""

    def __init__(self) -> None:
        self._slots: WeakValueDictionary[Any, asyncio.Semaphore] = WeakValueDictionary()

    def slot(self, address: Any) -> asyncio.Semaphore:
        """Return the semaphore to hold while a connection to `address` is opened."""
        slot = self._slots.get(address)
        if slot is None:
            slot = self._slots[address] = asyncio.Semaphore(HANDSHAKES_PER_NODE_MAX)
        return slot


class _PacedConnector(aiohttp.TCPConnector):
    """Connector that opens few connections at a time, so that each meets its time limit."""

    def __init__(self, tls: ssl.SSLContext | None, handshakes: _Handshakes, **more: Any) -> None:
        super().__init__(limit=0, ssl=tls or True, **more)
        self._handshakes = handshakes

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        async with self._handshakes.slot(req.connection_key):  # its time limit starts here
            return await super()._create_connection(req, traces, timeout)


class _KeepingConnector(_PacedConnector):
    """Connector that reuses connections for ten minutes, as certificates may change."""

    def __init__(self, tls: ssl.SSLContext | None, handshakes: _Handshakes) -> None:
        super().__init__(tls, handshakes, keepalive_timeout=CONNECTION_IDLE_S)
        self._opened_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    async def connect(self, *arguments: Any, **options: Any) -> Connection:
        """Return a connection that is young enough, or a new one if the request needs one."""
        choice = _CHOICE.get()
        while True:
            choice.was_kept = False
            connection = await super().connect(*arguments, **options)
            now_s = time.monotonic()
            opened_s = self._opened_s.get(connection.protocol)
            choice.was_kept = opened_s is not None
            if opened_s is None:
                self._opened_s[connection.protocol] = now_s
                return connection
            if not choice.is_new_only and now_s - opened_s < CONNECTION_LIFE_S:
                return connection
            connection.close()


class NodeHttp:
    """HTTP client that all links share, without a timeout, as prefills may be slow."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """Use clear text, or with `tls` mutual TLS."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        turns, calls = (
            _Handshakes(),
            _Handshakes(),
        )  # calls do not wait for turns
        once = _PacedConnector(tls, turns, force_close=True)
        self._once = aiohttp.ClientSession(connector=once, timeout=timeout)
        kept = {
            Use.CALL: _KeepingConnector(tls, calls),
            Use.STREAM: _KeepingConnector(tls, turns),
        }
        self._kept = {
            use: aiohttp.ClientSession(connector=kept[use], timeout=timeout) for use in Use
        }
        self._counts: Counter[tuple[Use, str]] = Counter()  # connections in use, by address
        self._unanswered: dict[str, asyncio.Semaphore] = {}  # by address
        self._answers: dict[aiohttp.ClientResponse, tuple[Use, str]] = {}  # on kept ones

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, including those in use."""
        for answer in list(self._answers):
            self.release(answer)
        for session in (self._once, *self._kept.values()):
            await session.close()

    async def post(
        self,
        url: str,
        path: str,
        data: Body,
        headers: Mapping[str, str],
        server_hostname: str | None = None,
        use: Use | None = None,
    ) -> aiohttp.ClientResponse:
        """Return the response as soon as it starts; the caller must `release` it or `let_end` it.

        With a `use`, `data` must be bytes that may arrive twice.
        """

        async def ask(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            return await session.post(
                url + path,
                data=_readable(data),
                headers=headers,
                allow_redirects=False,
                server_hostname=server_hostname,
            )

        return await self._send(ask, url, use)

    async def head(
        self,
        url: str,
        path: str,
        headers: Mapping[str, str],
        server_hostname: str | None,
        use: Use,
    ) -> aiohttp.ClientResponse:
        """Send a HEAD request to open a connection; the caller releases the response."""

        async def ask(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            return await session.head(
                url + path, headers=headers, allow_redirects=False, server_hostname=server_hostname
            )

        return await self._send(ask, url, use)

    async def _send(self, ask: _Ask, url: str, use: Use | None) -> aiohttp.ClientResponse:
        if use is Use.STREAM:
            async with self._unanswered.setdefault(url, asyncio.Semaphore(TURNS_UNANSWERED_MAX)):
                return await self._in_slot(ask, url, use)
        return await self._in_slot(ask, url, use)

    async def _in_slot(self, ask: _Ask, url: str, use: Use | None) -> aiohttp.ClientResponse:
        slot = (use, url) if use is not None else None
        if slot is None or self._counts[slot] >= slot[0].value:
            return await ask(self._once)
        self._counts[slot] += 1
        try:
            answer = await _on_kept(ask, self._kept[slot[0]])
        except BaseException:
            self._leave(slot)
            raise
        self._answers[answer] = slot
        return answer

    def release(self, answer: aiohttp.ClientResponse) -> None:
        """Keep the connection of a response that has ended; close any other."""
        answer.close()
        slot = self._answers.pop(answer, None)
        if slot is not None:
            self._leave(slot)

    def let_end(self, answer: aiohttp.ClientResponse) -> None:
        """Keep the connection of a response that ends within END_WAIT_S; close it otherwise."""
        if answer not in self._answers:
            answer.close()
            return
        waiting = asyncio.get_running_loop().call_later(END_WAIT_S, self.release, answer)

        def end() -> None:
            waiting.cancel()
            self.release(answer)

        answer.content.on_eof(end)

    def _leave(self, slot: tuple[Use, str]) -> None:
        self._counts[slot] -= 1
        if not self._counts[slot]:
            del self._counts[slot]


async def _on_kept(ask: _Ask, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
    choice = _ConnectionChoice(is_new_only=False)
    _CHOICE.set(choice)
    try:
        return await ask(session)
    except (aiohttp.ClientError, OSError):
        if not choice.was_kept:
            raise
    _CHOICE.set(_ConnectionChoice(is_new_only=True))
    return await ask(session)


def _readable(data: Body) -> Body | BytesIO:
    """Return a long body as a stream, which is sent in pieces without blocking the loop."""
    if isinstance(data, bytes) and len(data) > LARGE_BODY_BYTES:
        return BytesIO(data)
    return data
