"""POST /v1/responses, streaming and not, with the stored messages that a request continues."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fabric.errors import FabricError, RejectedError, TooLargeError
from fabric.ids import TenantId
from fabric.json_items import ItemCount
from fabric.limits import BODY_BYTES_MAX, JSON_ITEMS_MAX
from fabric.ports import Clock
from fabric.turn.generation import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    Identity,
    IdentityKind,
    ToolCallPart,
    ToolCalls,
)
from fabric.turn.messages import Message
from router.api.adapter import ApiAdapter
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT
from router.large_work import run_sized, weigh
from router.openai.responses.items import answered_message, conversation
from router.openai.responses.request import (
    ResponsesRequest,
    parse_responses,
    with_prompt,
)
from router.openai.responses.shape import ResponseShape
from router.openai.responses.store import ResponseStore, Settle, StoredResponse, settle_at_once
from router.openai.responses.stream import ItemStream
from router.openai.shape import OpenAiErrors
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent


class ResponsesAdapter(OpenAiErrors, ApiAdapter[ResponsesRequest]):
    """Dialect of POST /v1/responses."""

    path = "/v1/responses"
    streams_calls = True
    idle = COMMENT
    parse = staticmethod(parse_responses)

    def __init__(self, clock: Clock, store: ResponseStore, settle: Settle = settle_at_once) -> None:
        self._clock = clock
        self._store = store
        self._settle = settle

    async def with_history(self, tenant: TenantId, request: ResponsesRequest) -> ResponsesRequest:
        request = replace(request, tenant=tenant)
        if request.is_whole:
            return request
        before, identity = self._before(tenant, request)
        entries = tuple(
            entry if isinstance(entry, Message) else self._item(tenant, entry.id, entry.param)
            for entry in request.entries
        )
        request = replace(request, before=before, entries=entries, identity=identity)
        size_bytes = weigh([before, entries], BODY_BYTES_MAX)
        if size_bytes > BODY_BYTES_MAX:  # short names may refer to long items, repeatedly
            message = f"with the items that it names, the input is over {BODY_BYTES_MAX} bytes"
            raise TooLargeError(message, param="input")
        return await run_sized(tenant, size_bytes, partial(with_prompt, request))

    def _before(
        self, tenant: TenantId, request: ResponsesRequest
    ) -> tuple[tuple[Message, ...], Identity]:
        """Return the messages to continue, and the agent, which continues a response only once."""
        if request.previous is None:
            return (), request.identity
        stored = self._store.get(tenant, request.previous)
        if stored is None:
            message = f"Previous response with id '{request.previous[:100]}' not found."
            param = "previous_response_id"
            raise RejectedError(message, code="previous_response_not_found", param=param)
        identity = request.identity
        if not request.is_named and not stored.is_continued:
            identity = Identity(IdentityKind.AGENT, stored.agent)
        return stored.messages, identity

    def _item(self, tenant: TenantId, name: str, param: str) -> Message:
        message_of = self._store.item(tenant, name)
        if message_of is None:
            message = (
                f"Item with id '{name[:100]}' not found: it was not stored, or has been dropped."
            )
            raise RejectedError(message, code="item_not_found", param=param)
        return message_of

    def whole(
        self, request: ResponsesRequest, admitted: Admitted, answer: WholeAnswer
    ) -> dict[str, Any]:
        shape = self._shape(request, admitted)
        output: list[Any] = []
        is_cut = answer.finished.reason is FinishReason.LENGTH
        if answer.reasoning:
            output.append(shape.reasoning(fresh_name("rs_"), answer.reasoning))
        if answer.text.strip() or not answer.calls:
            # A cut answer with calls ended within the last one, so its text is whole.
            status = "incomplete" if is_cut and not answer.calls else "completed"
            name = fresh_name("msg_")
            output.append(shape.message(name, answer.text, answer.logprobs, status))
        output += [shape.call(call) for call in answer.calls]
        response = shape.ended(output, answer.finished, answer.reasoning_tokens)
        self._keep(shape, response)
        return response

    async def kept(self) -> None:
        await self._settle()

    async def frames(
        self,
        request: ResponsesRequest,
        admitted: Admitted,
        events: AsyncGenerator[AnswerEvent | ToolCallPart, None],
    ) -> AsyncGenerator[bytes, None]:
        shape = self._shape(request, admitted)
        items = ItemStream(shape)
        async with aclosing(events):
            yield items.event("response.created", response=shape.begun())
            yield items.event("response.in_progress", response=shape.begun())
            try:
                async for event in events:
                    pieces = self._frames_of(shape, items, event)
                    if isinstance(event, Finished):
                        await self._settle()
                    for piece in pieces:
                        yield piece
            except FabricError as error:
                failed = shape.failed(items.output, error)
                yield items.event("response.failed", response=failed)

    def _frames_of(
        self, shape: ResponseShape, items: ItemStream, event: AnswerEvent | ToolCallPart
    ) -> Sequence[bytes]:
        if isinstance(event, Delta):
            return list(items.add_delta(event))
        if isinstance(event, ToolCallPart):
            return list(items.add_call_part(event))
        if isinstance(event, ToolCalls):
            return [piece for call in event.calls for piece in items.add_call(call)]
        is_cut = event.reason is FinishReason.LENGTH
        frames = list(items.end(is_cut=is_cut))
        response = shape.ended(items.output, event, items.reasoning_tokens)
        self._keep(shape, response)
        kind = "response.incomplete" if is_cut else "response.completed"
        return [*frames, items.event(kind, response=response)]

    def _keep(self, shape: ResponseShape, response: dict[str, Any]) -> None:
        request, admitted = shape.request, shape.admitted
        if not request.keeps or request.tenant is None:
            return
        argument_items = ItemCount(JSON_ITEMS_MAX)
        read = {item["id"]: answered_message(item, argument_items) for item in response["output"]}
        messages = conversation(None, [*request.messages(), *read.values()])
        stored = StoredResponse(
            body=response,
            given=request.given,
            messages=tuple(messages),
            items=read,
            agent=admitted.agent,
            epoch=admitted.epoch,
        )
        self._store.put(request.tenant, stored)

    def _shape(self, request: ResponsesRequest, admitted: Admitted) -> ResponseShape:
        """Return the shape of an answer; mark the response that it continues as continued."""
        if request.previous is not None and request.tenant is not None:
            stored = self._store.get(request.tenant, request.previous)
            if stored is not None:
                self._store.note_continued(request.tenant, stored)
        return ResponseShape(request, admitted, int(self._clock.wall_s()))
