"""The routes for hibernation files: export of an agent, and import."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fabric.codec import to_plain
from fabric.control.hibernation_calls import (
    CALL_HEADER,
    EPOCH_HEADER,
    HIBERNATE_PATH,
    MEDIA_TYPE,
    RESUME_PATH,
    REVISION_HEADER,
    Hibernate,
    Resume,
    Resumed,
    decode_header,
)
from fabric.control.term_calls import TERM_HEADER, parse_term
from fabric.errors import FabricError, OverloadedError, TooLargeError
from fabric.fair_share import FairShare
from fabric.hosting.http_server import wait_for_disconnect
from fabric.hosting.pace import Pace
from fabric.ids import TenantId
from fabric.keys import http_secret
from fabric.limits import (
    HIBERNATION_BYTES_MAX,
    HIBERNATION_BYTES_PER_S_MIN,
    HIBERNATION_FRAME_BYTES_MAX,
    HIBERNATION_GRACE_S,
)
from node.http.routes import authorize, route
from node.limits import HIBERNATIONS_MAX
from node.migration.hibernation_export import Export, Exports
from node.migration.hibernation_import import Imports
from node.store.granted_terms import GrantedTerms

_log = logging.getLogger(__name__)


class HibernationHttp:
    """Routes of hibernation files, a few files at a time."""

    def __init__(
        self, cluster_key: bytes, exports: Exports, imports: Imports, terms: GrantedTerms
    ) -> None:
        self._terms = terms
        self._exports = exports
        self._imports = imports
        self._secret = http_secret(cluster_key)
        self._open = FairShare[TenantId](HIBERNATIONS_MAX)

    def routes(self) -> list[Route]:
        return [
            route(HIBERNATE_PATH, self.hibernate),
            route(RESUME_PATH, self.resume),
        ]

    async def hibernate(self, request: Request) -> Response:
        """Answer with the agent's file."""
        authorize(request, self._secret)
        call = decode_header(Hibernate, request.headers.get(CALL_HEADER, ""))
        self._begin(call.tenant)
        export = await self._open_export(self._exports.begin(call), call.tenant)
        headers = {
            "content-length": str(export.total_bytes),
            EPOCH_HEADER: str(export.epoch),
            REVISION_HEADER: str(export.revision),
        }
        return _FileResponse(export, partial(self._end_export, export, call.tenant), headers)

    async def resume(self, request: Request) -> Response:
        """Import the request's body as an agent's file."""
        authorize(request, self._secret)
        term = parse_term(request.headers.get(TERM_HEADER))
        await self._terms.admit(term)
        call = decode_header(Resume, request.headers.get(CALL_HEADER, ""))
        self._begin(call.tenant)
        try:
            resumed = await self._take(call, request, term)
        finally:
            self._open.give(call.tenant)
        return JSONResponse(to_plain(resumed))

    async def _open_export(self, export: Export, tenant: TenantId) -> Export:
        try:
            await export.open()
        except BaseException:
            await self._end_export(export, tenant)
            raise
        return export

    async def _take(self, call: Resume, request: Request, term: int | None) -> Resumed:
        arriving, budget = self._imports.begin(call), self._imports.budget
        in_worker = self._imports.records.workers.run
        arriving.check_allowed()
        try:
            has_room = False
            async for data in _batches(request.stream()):
                await in_worker(partial(arriving.feed, data))
                if not has_room and (missing_bytes := arriving.missing_bytes) is not None:
                    await budget.make_room(call.tenant, missing_bytes)
                    has_room = True
            await in_worker(arriving.finish)
            await budget.make_place(call.tenant)
            self._terms.check(term)  # reading the file took time
            return await arriving.commit()
        finally:  # after a commit there is nothing to abandon
            await asyncio.shield(in_worker(arriving.abandon))

    def _begin(self, tenant: TenantId) -> None:
        if not self._open.take(tenant):
            message = "too many agents are being hibernated or resumed here; retry later"
            raise OverloadedError(message)

    async def _end_export(self, export: Export, tenant: TenantId) -> None:
        self._open.give(tenant)
        await asyncio.shield(export.close())


class _FileResponse(Response):
    """Response that streams an export, closes it in any case, and drops a slow reader."""

    def __init__(
        self, export: Export, end: Callable[[], Awaitable[None]], headers: dict[str, str]
    ) -> None:
        super().__init__(headers=headers, media_type=MEDIA_TYPE)
        self._export = export
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await self._stream(send, disconnected)
        except (FabricError, OSError) as error:
            # The status is sent already: only an early end can show the router the error.
            _log.warning(
                "the export of a file failed: %s", getattr(error, "code", type(error).__name__)
            )
        finally:
            disconnected.cancel()
            await self._end()

    async def _stream(self, send: Send, gone: "asyncio.Task[None]") -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        pace = Pace(HIBERNATION_BYTES_PER_S_MIN, HIBERNATION_GRACE_S)
        now_s = asyncio.get_running_loop().time
        async for chunk in self._export.chunks():
            if gone.done():
                return
            began_s = now_s()
            async with asyncio.timeout(pace.left_s):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            pace.add(len(chunk), now_s() - began_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _batches(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join a body's pieces into larger batches; bound their sum and their pauses."""
    batch: list[bytes] = []
    batch_bytes = total_bytes = 0
    pace = Pace(HIBERNATION_BYTES_PER_S_MIN, HIBERNATION_GRACE_S)
    now_s = asyncio.get_running_loop().time
    while True:
        began_s = now_s()
        try:
            async with asyncio.timeout(pace.left_s):
                data = await anext(stream, None)
        except TimeoutError:
            raise pace.stalled_error() from None
        if data is None:
            break
        pace.add(len(data), now_s() - began_s)
        batch.append(data)
        batch_bytes += len(data)
        total_bytes += len(data)
        if total_bytes > HIBERNATION_BYTES_MAX:
            message = f"the file is over the limit of {HIBERNATION_BYTES_MAX} bytes"
            raise TooLargeError(message)
        if batch_bytes >= HIBERNATION_FRAME_BYTES_MAX:
            yield b"".join(batch)
            batch, batch_bytes = [], 0
    yield b"".join(batch)
