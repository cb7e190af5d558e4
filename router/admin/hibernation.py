"""Routes that export and import an agent as one signed file, streamed both ways."""

from collections.abc import AsyncIterator

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fabric.control.calls import NODE_HEADER
from fabric.control.hibernation_calls import (
    EPOCH_HEADER,
    MEDIA_TYPE,
    REVISION_HEADER,
    SALT_HEADER,
    SIGNING_KEY_HEADER,
)
from fabric.errors import RejectedError
from fabric.record.hibernation_file import (
    LEAD_BYTES_MAX,
    SALT_BYTES_MAX,
    SIGNING_KEY_BYTES,
    HibernationHeader,
    peek_header,
    require_sound,
)
from router.admin.views.moves import RESUMED
from router.http.auth import agent_key
from router.http.refusals import query_flag
from router.moves.hibernations import PASS_BYTES, Hibernations, ResumeOptions, Upload

_PASSED_ON = ("content-length", EPOCH_HEADER, REVISION_HEADER)


class HibernationApi:
    """Export and import of the tenant's own agents."""

    def __init__(self, hibernations: Hibernations) -> None:
        self._hibernations = hibernations

    def routes(self) -> list[Route]:
        return [
            Route("/v1/agents/{agent}/hibernate", self.hibernate, methods=["POST"]),
            Route("/v1/agents/{agent}/resume", self.resume, methods=["POST"]),
        ]

    async def hibernate(self, request: Request) -> Response:
        """Stream the agent's file; the agent stays."""
        signing_key = _hex(request, SIGNING_KEY_HEADER, SIGNING_KEY_BYTES, SIGNING_KEY_BYTES)
        salt = _hex(request, SALT_HEADER, 0, SALT_BYTES_MAX) or b""
        node, answer = await self._hibernations.hibernate(agent_key(request), signing_key, salt)
        headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        headers[NODE_HEADER] = node
        return StreamingResponse(_body(answer), headers=headers, media_type=MEDIA_TYPE)

    async def resume(self, request: Request) -> Response:
        """Import the body as an agent's file; answer once the agent is owned and durable."""
        query = request.query_params
        options = ResumeOptions(
            key=agent_key(request),
            node=query.get("node"),
            replace=query_flag(query, "replace"),
            signing_key=_hex(request, SIGNING_KEY_HEADER, SIGNING_KEY_BYTES, SIGNING_KEY_BYTES),
        )
        rest = request.stream()
        header, lead = await _header(rest)
        resumed = await self._hibernations.resume(options, header, Upload(lead, rest))
        return JSONResponse(RESUMED.row(resumed, model=header.model))


async def _header(rest: AsyncIterator[bytes]) -> tuple[HibernationHeader, bytes]:
    """Read a body up to the end of its file's header; return the header and the bytes read."""
    lead = b""
    async for part in rest:
        lead += part
        header = peek_header(lead)
        if header is not None:
            return header, lead
        require_sound(len(lead) < LEAD_BYTES_MAX, "its header does not end")
    message = "the hibernation file was cut short" if lead else "the body holds no file"
    raise RejectedError(message, code="truncated_file" if lead else "not_a_hibernation_file")


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    # Closing also ends the node's side if the client disconnects early.
    async with answer:
        async for part in answer.content.iter_chunked(PASS_BYTES):
            yield part


def _hex(request: Request, name: str, bytes_min: int, bytes_max: int) -> bytes | None:
    """Return a hexadecimal header's bytes, or None; errors never repeat its value."""
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = None
    if raw is None or not bytes_min <= len(raw) <= bytes_max:
        length = f"{2 * bytes_min}" if bytes_min == bytes_max else f"up to {2 * bytes_max}"
        message = f"the header {name} must be {length} hexadecimal digits"
        raise RejectedError(message, code="invalid_signing_key", param=name)
    return raw
