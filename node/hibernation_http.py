"""The two routes on which the router moves an agent's file out of, or into, this node."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fabric.cluster_secret import http_secret
from fabric.codec import to_plain
from fabric.errors import FabricError, OverloadedError, RejectedError, TooLargeError
from fabric.hibernation_calls import (
    CALL_HEADER,
    EPOCH_HEADER,
    HIBERNATE_PATH,
    MEDIA_TYPE,
    RESUME_PATH,
    REVISION_HEADER,
    Hibernate,
    Resume,
    Resumed,
    decode_beside,
)
from fabric.limits import (
    HIBERNATION_BYTES_MAX,
    HIBERNATION_FRAME_BYTES_MAX,
    HIBERNATION_STALL_S,
    HIBERNATIONS_MAX,
)
from node.hibernation_export import Export
from node.hibernation_import import Import
from node.http_server import authorize, error_response

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)


class HibernationHttp:
    """Serves both routes, a few files at a time."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._secret = http_secret(node.config.cluster_key)
        self._open_count = 0

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(HIBERNATE_PATH, self.hibernate, methods=["POST"]),
            Route(RESUME_PATH, self.resume, methods=["POST"]),
        ]

    async def hibernate(self, request: Request) -> Response:
        """Answer with the agent's file."""
        try:
            authorize(request, self._secret)
            call = decode_beside(Hibernate, request.headers.get(CALL_HEADER, ""))
            self._begin()
            export = await self._opened(Export(self._node, call))
        except FabricError as error:
            return error_response(error)
        headers = {
            "content-length": str(export.total_bytes),
            EPOCH_HEADER: str(export.epoch),
            REVISION_HEADER: str(export.revision),
        }
        return _FileResponse(export, partial(self._end_export, export), headers)

    async def resume(self, request: Request) -> Response:
        """Take the request's body in as an agent's file."""
        try:
            authorize(request, self._secret)
            call = decode_beside(Resume, request.headers.get(CALL_HEADER, ""))
            self._begin()
            try:
                resumed = await self._take(call, request)
            finally:
                self._open_count -= 1
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse(to_plain(resumed))

    async def _opened(self, export: Export) -> Export:
        try:
            await export.open()
        except BaseException:
            await self._end_export(export)
            raise
        return export

    async def _take(self, call: Resume, request: Request) -> Resumed:
        node, arriving = self._node, Import(self._node, call)
        arriving.check_welcome()
        try:
            has_room = False
            async for data in _batches(request.stream()):
                await node.in_worker(partial(arriving.feed, data))
                if not has_room and (missing_bytes := arriving.missing_bytes) is not None:
                    await node.reclaim.make_room(call.tenant, missing_bytes)
                    has_room = True
            await node.in_worker(arriving.finish)
            await node.reclaim.make_place(call.tenant)
            return await arriving.commit()
        finally:  # a commit leaves nothing to abandon
            await asyncio.shield(node.in_worker(arriving.abandon))

    def _begin(self) -> None:
        if self._open_count >= HIBERNATIONS_MAX:
            message = f"{HIBERNATIONS_MAX} agents are being hibernated or resumed here already"
            raise OverloadedError(message)
        self._open_count += 1

    async def _end_export(self, export: Export) -> None:
        self._open_count -= 1
        await asyncio.shield(export.close())


class _FileResponse(Response):
    """Streams an export and ends it, however that goes; drops a reader that stands still."""

    def __init__(
        self, export: Export, end: Callable[[], Awaitable[None]], headers: dict[str, str]
    ) -> None:
        super().__init__(headers=headers, media_type=MEDIA_TYPE)
        self._export = export
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnect(receive))
        try:
            await self._stream(send, gone)
        except (FabricError, OSError) as error:
            # The status is sent: an answer that ends early is all that can tell the router.
            _log.warning("a file broke off: %s", error)
        finally:
            gone.cancel()
            await self._end()

    async def _stream(self, send: Send, gone: "asyncio.Task[None]") -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._export.chunks():
            if gone.done():
                return
            async with asyncio.timeout(HIBERNATION_STALL_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _batches(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Join a body's pieces into ones worth a thread's while; bound their sum and their pauses."""
    batch: list[bytes] = []
    batch_bytes = total_bytes = 0
    while True:
        try:
            async with asyncio.timeout(HIBERNATION_STALL_S):
                data = await anext(stream, None)
        except TimeoutError:
            message = f"no more of the file came for {HIBERNATION_STALL_S:g} s"
            raise RejectedError(message, code="upload_stalled") from None
        if data is None:
            break
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
