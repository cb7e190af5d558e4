"""One route for every dialect: a request is parsed, opened as a turn, and answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.hosting.http_server import unless_disconnected
from fabric.ids import TenantId
from fabric.turn.generation import Admitted
from router.api.adapter import ApiAdapter, Asked, SeveralAdapter
from router.api.edit_fields import edits_of
from router.api.edit_stage import EditStage, edit_headers
from router.api.late_stream import Opening, Streamed
from router.api.model_names import ModelNames
from router.fresh_ids import fresh_operation
from router.http.auth import tenant_of
from router.http.fields import Fields, refuse
from router.http.json_body import read_parsed
from router.http.sse import EventStream
from router.turn_request import TurnRequest
from router.turns.answer import cache_headers, gather
from router.turns.fan_out import FanOut
from router.turns.open_turn import OpenTurn
from router.turns.owner_wait import AwaitedNodes
from router.turns.turns import Turns

IGNORED_HEADER: Final = "x-macfabric-ignored"

A = TypeVar("A", bound=Asked)


@dataclass(frozen=True, slots=True)
class Desk:
    """Services that answer the requests of all dialects."""

    turns: Turns
    names: ModelNames
    completion_tokens_max: int
    edits: EditStage


def turn_routes(adapters: Sequence[ApiAdapter[Any]], desk: Desk) -> list[Route]:
    """Make a route of each adapter."""
    return [
        Route(adapter.path, partial(answer_turn, adapter, desk), methods=["POST"])
        for adapter in adapters
    ]


async def answer_turn(adapter: ApiAdapter[Any], desk: Desk, request: Request) -> Response:
    """Answer one request, whole or as its events come."""
    parsed = await read_parsed(request, partial(parsed_request, adapter, request.headers))
    tenant = tenant_of(request)
    asked: Asked = await adapter.recalled(tenant, parsed)
    asked, turn = await unless_disconnected(request.receive, turn_of(desk, tenant, asked))
    if asked.several is not None:
        return await _answer_several(
            cast("SeveralAdapter[Any]", adapter), desk.turns, request, asked, turn
        )
    waiting = AwaitedNodes()
    opening = desk.turns.open(turn, waiting)
    if asked.stream:

        def streamed(opened: OpenTurn) -> Streamed:
            events = opened.parts() if adapter.streams_calls else opened.events()
            frames = adapter.frames(asked, opened.admitted, cast("Any", events))
            headers = _headers(asked, opened.admitted)
            return Streamed(frames, headers, opened.close, lambda: opened.progress)

        return await _stream(adapter, request, asked, Opening(opening, waiting, streamed))
    opened = await unless_disconnected(request.receive, opening)
    headers = _headers(asked, opened.admitted)
    try:
        answer = await unless_disconnected(request.receive, gather(opened))
    finally:
        await opened.close()
    return JSONResponse(adapter.whole(asked, opened.admitted, answer), headers=headers)


async def turn_of(desk: Desk, tenant: TenantId, asked: A) -> tuple[A, TurnRequest]:
    """Turn a request into the turn that is asked of nodes, in the operator's bounds, edited."""
    limit = min(asked.sampling.max_tokens, desk.completion_tokens_max)
    asked = replace(asked, sampling=replace(asked.sampling, max_tokens=limit))
    model = await desk.names.resolve(asked.model)
    asked = await desk.edits.edited(tenant, asked, model)
    turn = asked.turn(fresh_operation(), tenant)
    return asked, replace(turn, model=model, edits=desk.edits.mode(asked.edits))


def parsed_request(adapter: ApiAdapter[A], headers: Mapping[str, str], body: dict[str, Any]) -> A:
    """Check a request, and what may be said in every dialect."""
    asked, edits = adapter.parse(headers, body), edits_of(headers, Fields(body))
    if edits.policies and not asked.is_whole_conversation:
        refuse(edits.policies[0].param, "this route brings no conversation that could be edited")
    return replace(asked, edits=edits)


async def _answer_several(
    adapter: SeveralAdapter[Any], turns: Turns, request: Request, asked: Asked, turn: TurnRequest
) -> Response:
    """Answer with several choices, which are told side by side."""
    several = asked.several
    assert several is not None, "asked for"
    if several.count > several.shown and turn.sampling.logprobs is None:  # the best are chosen
        turn = replace(turn, sampling=replace(turn.sampling, logprobs=0))
    each = [replace(turn, prompt=prompt, operation=fresh_operation()) for prompt in several.prompts]
    fan = FanOut(turns, each, several.count)
    waiting = AwaitedNodes()
    if asked.stream:

        def streamed(admitted: Admitted) -> Streamed:
            frames = adapter.all_frames(asked, lambda: fan.admitted, fan.parts())
            headers = _headers(asked, admitted)
            return Streamed(frames, headers, fan.close, lambda: fan.progress)

        return await _stream(adapter, request, asked, Opening(fan.open(waiting), waiting, streamed))
    headers = _headers(asked, await unless_disconnected(request.receive, fan.open()))
    try:
        answers = await unless_disconnected(request.receive, fan.gather())
    finally:
        await fan.close()
    return JSONResponse(adapter.all_whole(asked, fan.admitted, answers), headers=headers)


async def _stream(
    adapter: ApiAdapter[Any], request: Request, asked: Asked, opening: Opening[Any]
) -> Response:
    """Stream a turn once it is admitted, or begin earlier where it waits for a node to join."""
    made = await unless_disconnected(request.receive, opening.soon())
    if made is None:
        headers = _headers(asked)
        made = Streamed(opening.frames(), headers, opening.close, opening.progress)
    return EventStream(made.frames, made.headers, made.close, adapter, adapter.idle, made.progress)


def _headers(asked: Asked, admitted: Admitted | None = None) -> dict[str, str]:
    headers = cache_headers(admitted) if admitted is not None else {}
    headers |= edit_headers(asked.outcomes)
    if asked.ignored:
        headers[IGNORED_HEADER] = ", ".join(asked.ignored)
    return headers
