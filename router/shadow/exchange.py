"""The exchange of a router's own memory: the active router's route, and a standby's copying."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Protocol

import aiohttp
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fabric.codec import pack, unpack
from fabric.errors import FabricError, ForbiddenError, RejectedError, RetryLaterError
from router.http.auth import caller_of
from router.http.forwarded import Principal
from router.http.standby_gate import CHANGES_PATH, Relay
from router.limits import SHADOW_BYTES_MAX, SHADOW_POLL_S, SHADOW_RETRY_S
from router.shadow.change_log import ChangeLog
from router.shadow.run_files import FilePiece, FileState, RunFiles

FOLLOWER: Final = "a standby router"  # no valid name of an operator's key in settings
_LOG = logging.getLogger("macfabric.router.shadow")


class CopiedStore(Protocol):
    """Store whose items a standby keeps, too."""

    def encoded(self, name: str) -> bytes | None:
        """Return an item in bytes; None if it is gone."""
        ...

    def take(self, raw: bytes) -> None:
        """Store a copy of an item; raise RejectedError for other bytes."""
        ...

    def drop(self, name: str) -> None:
        """Remove an item."""
        ...

    def names(self) -> list[str]:
        """Return the names of all items."""
        ...


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """Request of a standby, which has everything up to `version` of a router's life."""

    life: str = ""
    version: int = 0
    files: dict[str, FileState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FollowAnswer:
    """Changes that a standby lacks; with `has_more`, some of those after its version."""

    life: str
    version: int
    is_whole: bool
    names: tuple[str, ...]  # of all items, if it is whole
    items: tuple[bytes, ...] = field(repr=False)
    gone: tuple[str, ...]
    files: tuple[FilePiece, ...]
    gone_files: tuple[str, ...]
    has_more: bool


class ChangesApi:
    """Route at which a standby copies what this router keeps; no client may read it."""

    def __init__(
        self,
        log: ChangeLog,
        store: CopiedStore,
        files: RunFiles | None,
        is_active: Callable[[], bool],
    ) -> None:
        self._log = log
        self._store = store
        self._files = files
        self._is_active = is_active

    def routes(self) -> list[Route]:
        return [Route(CHANGES_PATH, self.answer, methods=["POST"])]

    async def answer(self, request: Request) -> Response:
        """Answer with what is new, as soon as there is something."""
        if caller_of(request).operator != FOLLOWER:
            message = "only a standby router may copy what this one keeps"
            raise ForbiddenError(message)
        if not self._is_active():
            message = "this router is not the active one"
            raise RetryLaterError(message, code="no_active_router")
        follow = unpack(FollowRequest, await request.body())
        self._log.acknowledge(follow.life, follow.version)
        await self._log.wait_for_news(follow.life, follow.version, SHADOW_POLL_S)
        return Response(pack(await self._news(follow)), media_type="application/msgpack")

    async def _news(self, request: FollowRequest) -> FollowAnswer:
        """Return the changes that a standby lacks; its next request acknowledges their version."""
        log = self._log
        version, has_more = log.version, False
        pieces: list[FilePiece] = []
        gone_files: list[str] = []
        if self._files is not None:
            news = await asyncio.to_thread(self._files.news, request.files)
            pieces, gone_files, has_more = news
        if has_more:
            # An acknowledged version includes all of its files.
            version = request.version if request.life == log.life else 0
        changes = log.since(request.life, request.version)
        items: list[bytes] = []
        left_bytes, complete_version = SHADOW_BYTES_MAX, version
        for name in changes.names:
            if left_bytes <= 0:
                has_more = True
                break
            raw = self._store.encoded(name)
            items += [] if raw is None else [raw]
            left_bytes -= len(raw or b"")
            complete_version = log.version_of(name)
        if left_bytes <= 0 and has_more:
            version = min(version, complete_version)
        return FollowAnswer(
            life=log.life,
            version=version,
            is_whole=changes.is_whole,
            names=changes.names if changes.is_whole else (),
            items=tuple(items),
            gone=changes.gone,
            files=tuple(pieces),
            gone_files=tuple(gone_files),
            has_more=has_more,
        )


class Follower:
    """A standby's copies of what the active router keeps."""

    def __init__(self, relay: Relay, store: CopiedStore, files: RunFiles | None) -> None:
        self._relay = relay
        self._store = store
        self._files = files
        self._request = FollowRequest()

    async def run(self) -> None:
        """Copy all that the active router keeps, until cancelled."""
        while True:
            if not self._relay.is_active() and self._relay.active_url():
                try:
                    await self.round()
                    continue
                except (aiohttp.ClientError, OSError, FabricError, TimeoutError) as error:
                    _LOG.debug("cannot copy from the active router: %s", type(error).__name__)
            await asyncio.sleep(SHADOW_RETRY_S)

    async def round(self) -> None:
        """Copy what is new; the next round acknowledges it."""
        relay, request = self._relay, self._request
        proof = relay.forwarding.headers(Principal(None, FOLLOWER), "POST", CHANGES_PATH)
        async with relay.session.post(
            relay.active_url() + CHANGES_PATH,
            data=pack(request),
            headers=proof,
            server_hostname=relay.server_hostname,
            allow_redirects=False,
        ) as response:
            if response.status != HTTPStatus.OK:
                message = "the router at the active one's address is not active"
                raise RetryLaterError(message)
            answer = unpack(FollowAnswer, await response.read())
        await self._take(request, answer)

    async def _take(self, request: FollowRequest, answer: FollowAnswer) -> None:
        if answer.is_whole:
            kept = set(answer.names)
            for name in self._store.names():
                if name not in kept:
                    self._store.drop(name)
        for raw in answer.items:
            try:
                self._store.take(raw)
            except RejectedError as error:  # of another version: copy the rest anyway
                _LOG.warning("a stored response cannot be copied: %s", error.code)
        for name in answer.gone:
            self._store.drop(name)
        states = dict(request.files) if request.life == answer.life else {}
        if self._files is not None:
            for piece in answer.files:
                await asyncio.to_thread(self._files.take, piece)
                states[piece.path] = piece.state
            for path in answer.gone_files:
                await asyncio.to_thread(self._files.drop, path)
                states.pop(path, None)
        self._request = FollowRequest(answer.life, answer.version, states)
