"""The route of all dialects: parse a request, open its turn, answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.edit_mode import TRUNCATES
from fabric.hosting.http_server import unless_disconnected
from fabric.ids import TenantId
from fabric.turn.generation import Admitted
from router.api.adapter import ApiAdapter, ApiRequest, BatchAdapter
from router.api.edit_fields import edits_of
from router.api.edit_stage import EditStage, edit_headers
from router.api.late_stream import PendingTurn, StreamParts
from router.api.models import ModelNames
from router.api.shared_fields import unenforced_names
from router.fresh_ids import fresh_operation
from router.http.auth import tenant_of
from router.http.errors import request_id_of
from router.http.json_body import read_parsed
from router.http.refusals import refuse
from router.http.sse import EventStream
from router.http.turn_headers import ignored_header, session_of, sub_agent_of
from router.turn_request import TurnRequest
from router.turns.answer import cache_headers, gather
from router.turns.fan_out import FanOut
from router.turns.open_turn import OpenTurn
from router.turns.owner_wait import AwaitedNodes
from router.turns.turns import Turns

A = TypeVar("A", bound=ApiRequest)
_KEEPS_MEMORY: Final = (
    "generate truncates nothing, as it keeps the agent's memory: remove parts of it by a directive "
    "(POST /v1/agents/{agent}/directives), or send the whole conversation to another route"
)


@dataclass(frozen=True, slots=True)
class TurnServices:
    """Services that all routes of turns use."""

    turns: Turns
    names: ModelNames
    completion_tokens_max: int
    edits: EditStage


def turn_routes(adapters: Sequence[ApiAdapter[Any]], services: TurnServices) -> list[Route]:
    """Return the routes of the adapters."""
    return [
        Route(adapter.path, partial(answer_turn, adapter, services), methods=["POST"])
        for adapter in adapters
    ]


async def answer_turn(
    adapter: ApiAdapter[Any], services: TurnServices, request: Request
) -> Response:
    """Answer one request, whole or streamed."""
    sent = await read_parsed(request, partial(parsed_request, adapter, request.headers))
    tenant = tenant_of(request)
    parsed: ApiRequest = await adapter.with_history(tenant, sent)
    parsed, turn = await unless_disconnected(request.receive, turn_of(services, tenant, parsed))
    turn = replace(turn, id=request_id_of(request.scope))
    if parsed.batch is not None:
        return await _answer_batch(
            cast("BatchAdapter[Any]", adapter), services.turns, request, parsed, turn
        )
    waiting = AwaitedNodes()
    opening = services.turns.open(turn, waiting)
    if parsed.stream:

        def streamed(opened: OpenTurn) -> StreamParts:
            events = opened.parts() if adapter.streams_calls else opened.events()
            frames = adapter.frames(parsed, opened.admitted, cast("Any", events))
            headers = _headers(parsed, opened.admitted)
            return StreamParts(frames, headers, opened.close, lambda: opened.progress)

        return await _stream(adapter, request, parsed, PendingTurn(opening, waiting, streamed))
    opened = await unless_disconnected(request.receive, opening)
    headers = _headers(parsed, opened.admitted)
    try:
        answer = await unless_disconnected(request.receive, gather(opened))
    finally:
        await opened.close()
    whole = adapter.whole(parsed, opened.admitted, answer)
    await adapter.kept()
    return JSONResponse(whole, headers=headers)


async def turn_of(services: TurnServices, tenant: TenantId, parsed: A) -> tuple[A, TurnRequest]:
    """Apply limits and policies to a request; return it with its turn."""
    limit = min(parsed.sampling.max_tokens, services.completion_tokens_max)
    parsed = replace(parsed, sampling=replace(parsed.sampling, max_tokens=limit))
    model = await services.names.resolve(parsed.model)
    parsed = await services.edits.edited(tenant, parsed, model)
    turn = parsed.turn(fresh_operation(), tenant)
    return parsed, replace(turn, model=model, edits=services.edits.mode(parsed.edits))


def parsed_request(adapter: ApiAdapter[A], headers: Mapping[str, str], sent: dict[str, Any]) -> A:
    """Parse a request of any dialect, with the policies that it requests."""
    parsed, edits = adapter.parse(headers, sent), edits_of(headers, sent)
    if edits.policies and not parsed.is_whole_conversation:
        refuse(edits.policies[0].param, "this route takes no conversation to edit; remove it")
    if edits.truncation == TRUNCATES and parsed.continues_memory:
        refuse("macfabric.truncation", _KEEPS_MEMORY)
    prompt = parsed.prompt
    unenforced = unenforced_names(parsed.sampling.output, prompt.tools or (), prompt.calls)
    return replace(
        parsed,
        edits=edits,
        ignored=parsed.ignored + unenforced,
        session=session_of(headers),
        sub_agent=sub_agent_of(headers),
    )


async def _answer_batch(
    adapter: BatchAdapter[Any],
    turns: Turns,
    request: Request,
    parsed: ApiRequest,
    turn: TurnRequest,
) -> Response:
    """Answer with several choices, streamed in parallel."""
    batch = parsed.batch
    assert batch is not None, "checked by the caller"
    if batch.count > batch.shown and turn.sampling.logprobs is None:  # to choose the best ones
        turn = replace(turn, sampling=replace(turn.sampling, logprobs=0))
    copies = [replace(turn, prompt=prompt, operation=fresh_operation()) for prompt in batch.prompts]
    fan = FanOut(turns, copies, batch.count)
    waiting = AwaitedNodes()
    if parsed.stream:

        def streamed(admitted: Admitted) -> StreamParts:
            frames = adapter.all_frames(parsed, lambda: fan.admitted, fan.parts())
            headers = _headers(parsed, admitted)
            return StreamParts(frames, headers, fan.close, lambda: fan.progress)

        return await _stream(
            adapter, request, parsed, PendingTurn(fan.open(waiting), waiting, streamed)
        )
    headers = _headers(parsed, await unless_disconnected(request.receive, fan.open()))
    try:
        answers = await unless_disconnected(request.receive, fan.gather())
    finally:
        await fan.close()
    return JSONResponse(adapter.all_whole(parsed, fan.admitted, answers), headers=headers)


async def _stream(
    adapter: ApiAdapter[Any], request: Request, parsed: ApiRequest, opening: PendingTurn[Any]
) -> Response:
    """Stream a turn once it is admitted, or earlier if that has to wait for a node."""
    parts = await unless_disconnected(request.receive, opening.open_if_ready())
    if parts is None:
        headers = _headers(parsed)
        parts = StreamParts(opening.frames(), headers, opening.close, opening.progress)
    return EventStream(
        parts.frames, parts.headers, parts.close, adapter, adapter.idle, parts.progress
    )


def _headers(parsed: ApiRequest, admitted: Admitted | None = None) -> dict[str, str]:
    headers = cache_headers(admitted) if admitted is not None else {}
    return headers | edit_headers(parsed.outcomes) | ignored_header(parsed.ignored)
