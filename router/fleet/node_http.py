"""The router's HTTP connections to nodes: kept where a client waits for what comes over them.

A new one costs both ends a handshake: 5.6 ms of CPU time together, where a call on a kept one takes
0.6 in all. A kept one may be gone when it is needed: what was sent on it and not answered is sent
once more, on a new one, so only what may arrive twice is sent on kept ones.
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
from router.limits import HANDSHAKES_PER_NODE_MAX, KEPT_IDLE_S, KEPT_LIFE_S, TURNS_UNANSWERED_MAX

CONNECT_TIMEOUT_S = 2.0
END_WAIT_S = 1.0  # between an answer's last event and its end
LARGE_BODY_BYTES: Final = 64 * KIB

Body = bytes | AsyncIterator[bytes]
_Ask = Callable[[aiohttp.ClientSession], Awaitable[aiohttp.ClientResponse]]


class Use(Enum):
    """Purpose of a connection, and how many of them one node's address gets."""

    CALL = 4  # as many as moves leave a node at a time, and one
    STREAM = 32  # as many turns as a node computes at a time


@dataclass(slots=True)
class _Way:
    """Kind of connection that a request takes: a kept one or a new one."""

    is_new_only: bool
    was_kept: bool = False


_WAY: ContextVar[_Way] = ContextVar("way")


class _Handshakes:
    """Bounds how many connections to one address are being opened at a time."""

    def __init__(self) -> None:
        self._places: WeakValueDictionary[Any, asyncio.Semaphore] = WeakValueDictionary()

    def place(self, address: Any) -> asyncio.Semaphore:
        """Return the semaphore to hold while a connection to `address` is opened."""
        found = self._places.get(address)
        if found is None:
            found = self._places[address] = asyncio.Semaphore(HANDSHAKES_PER_NODE_MAX)
        return found


class _PacedConnector(aiohttp.TCPConnector):
    """Opens few connections at a time, so that none of them exceeds its time limit."""

    def __init__(self, tls: ssl.SSLContext | None, handshakes: _Handshakes, **more: Any) -> None:
        super().__init__(limit=0, ssl=tls or True, **more)
        self._handshakes = handshakes

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        async with self._handshakes.place(req.connection_key):  # its time limit begins here
            return await super()._create_connection(req, traces, timeout)


class _KeepingConnector(_PacedConnector):
    """Lets requests begin on a connection for its first ten minutes: a certificate may change."""

    def __init__(self, tls: ssl.SSLContext | None, handshakes: _Handshakes) -> None:
        super().__init__(tls, handshakes, keepalive_timeout=KEPT_IDLE_S)
        self._opened_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    async def connect(self, *arguments: Any, **options: Any) -> Connection:
        """Give a connection that is young enough, or new if it has to be."""
        way = _WAY.get()
        while True:
            way.was_kept = False
            connection = await super().connect(*arguments, **options)
            now_s = time.monotonic()
            opened_s = self._opened_s.get(connection.protocol)
            way.was_kept = opened_s is not None
            if opened_s is None:
                self._opened_s[connection.protocol] = now_s
                return connection
            if not way.is_new_only and now_s - opened_s < KEPT_LIFE_S:
                return connection
            connection.close()


class NodeHttp:
    """The HTTP client that all links share; it never gives up on a slow prefill."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """Speak clear text; or with `tls`, show a certificate and take no peer without one."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        turns, calls = _Handshakes(), _Handshakes()  # no call waits for the handshakes of turns
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
        """Close all connections, also those in use."""
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
        """Return the answer as soon as it begins; whoever gets it calls `release` or `let_end`.

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

        return await self._asked(ask, url, use)

    async def head(
        self,
        url: str,
        path: str,
        headers: Mapping[str, str],
        server_hostname: str | None,
        use: Use,
    ) -> aiohttp.ClientResponse:
        """Ask for nothing, so that a connection is there; whoever gets the answer releases it."""

        async def ask(session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
            return await session.head(
                url + path, headers=headers, allow_redirects=False, server_hostname=server_hostname
            )

        return await self._asked(ask, url, use)

    async def _asked(self, ask: _Ask, url: str, use: Use | None) -> aiohttp.ClientResponse:
        if use is Use.STREAM:
            async with self._unanswered.setdefault(url, asyncio.Semaphore(TURNS_UNANSWERED_MAX)):
                return await self._placed(ask, url, use)
        return await self._placed(ask, url, use)

    async def _placed(self, ask: _Ask, url: str, use: Use | None) -> aiohttp.ClientResponse:
        place = (use, url) if use is not None else None
        if place is None or self._counts[place] >= place[0].value:
            return await ask(self._once)
        self._counts[place] += 1
        try:
            answer = await _on_kept(ask, self._kept[place[0]])
        except BaseException:
            self._leave(place)
            raise
        self._answers[answer] = place
        return answer

    def release(self, answer: aiohttp.ClientResponse) -> None:
        """Close an answer's connection, unless the whole answer has come: then keep it."""
        answer.close()
        place = self._answers.pop(answer, None)
        if place is not None:
            self._leave(place)

    def let_end(self, answer: aiohttp.ClientResponse) -> None:
        """Keep the connection of an answer of which only the end is missing, if that comes soon."""
        if answer not in self._answers:
            answer.close()
            return
        waiting = asyncio.get_running_loop().call_later(END_WAIT_S, self.release, answer)

        def end() -> None:
            waiting.cancel()
            self.release(answer)

        answer.content.on_eof(end)

    def _leave(self, place: tuple[Use, str]) -> None:
        self._counts[place] -= 1
        if not self._counts[place]:
            del self._counts[place]


async def _on_kept(ask: _Ask, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
    way = _Way(is_new_only=False)
    _WAY.set(way)
    try:
        return await ask(session)
    except (aiohttp.ClientError, OSError):
        if not way.was_kept:
            raise
    _WAY.set(_Way(is_new_only=True))
    return await ask(session)


def _readable(data: Body) -> Body | BytesIO:
    """Let a long body be sent piece by piece, with others' work in between."""
    if isinstance(data, bytes) and len(data) > LARGE_BODY_BYTES:
        return BytesIO(data)
    return data
