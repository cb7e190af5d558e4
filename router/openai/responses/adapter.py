"""POST /v1/responses, streaming and not; with what was said before, where it is stored."""

from collections.abc import AsyncGenerator, Mapping, Sequence
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
    FinishReason,
    Identity,
    IdentityKind,
    ToolCallPart,
    ToolCalls,
)
from fabric.turn.messages import Message
from router.api.adapter import ApiAdapter
from router.fresh_ids import fresh_name
from router.http.fields import Fields
from router.http.sse import COMMENT
from router.large_work import run_sized, weigh
from router.openai.errors import OpenAiErrors
from router.openai.responses.items import conversation, parse_item
from router.openai.responses.request import (
    ResponsesRequest,
    parse_responses,
    with_prompt,
)
from router.openai.responses.shape import ResponseShape
from router.openai.responses.store import ResponseStore, StoredResponse
from router.openai.responses.stream import ItemStream
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent


class ResponsesAdapter(OpenAiErrors, ApiAdapter[ResponsesRequest]):
    """Responses as OpenAI spells them."""

    path = "/v1/responses"
    streams_calls = True
    idle = COMMENT

    def __init__(self, clock: Clock, store: ResponseStore) -> None:
        self._clock = clock
        self._store = store

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> ResponsesRequest:
        return parse_responses(headers, body)

    async def recalled(self, tenant: TenantId, asked: ResponsesRequest) -> ResponsesRequest:
        asked = replace(asked, tenant=tenant)
        if asked.is_whole:
            return asked
        before, identity = self._before(tenant, asked)
        entries = tuple(
            entry if isinstance(entry, Message) else self._item(tenant, entry.id, entry.param)
            for entry in asked.entries
        )
        asked = replace(asked, before=before, entries=entries, identity=identity)
        size_bytes = weigh([before, entries], BODY_BYTES_MAX)
        if size_bytes > BODY_BYTES_MAX:  # a short name may stand for much, again and again
            message = f"with what it names, the input is over {BODY_BYTES_MAX} bytes"
            raise TooLargeError(message, param="input")
        return await run_sized(tenant, size_bytes, partial(with_prompt, asked))

    def _before(
        self, tenant: TenantId, asked: ResponsesRequest
    ) -> tuple[tuple[Message, ...], Identity]:
        """Find what is continued, and by whom: the agent itself goes on only once from a place."""
        if asked.previous is None:
            return (), asked.identity
        stored = self._store.get(tenant, asked.previous)
        if stored is None:
            message = f"Previous response with id '{asked.previous[:100]}' not found."
            param = "previous_response_id"
            raise RejectedError(message, code="previous_response_not_found", param=param)
        identity = asked.identity
        if not asked.is_named and not stored.is_continued:
            identity = Identity(IdentityKind.AGENT, stored.agent)
        return stored.messages, identity

    def _item(self, tenant: TenantId, name: str, param: str) -> Message:
        found = self._store.item(tenant, name)
        if found is None:
            message = f"Item with id '{name[:100]}' not found: it was not stored, or not for long."
            raise RejectedError(message, code="item_not_found", param=param)
        return found

    def whole(
        self, asked: ResponsesRequest, admitted: Admitted, answer: WholeAnswer
    ) -> dict[str, Any]:
        shape = self._shape(asked, admitted)
        output: list[Any] = []
        is_cut = answer.finished.reason is FinishReason.LENGTH
        if answer.reasoning:
            output.append(shape.reasoning(fresh_name("rs_"), answer.reasoning))
        if answer.text.strip() or not answer.calls:
            status = "incomplete" if is_cut else "completed"
            name = fresh_name("msg_")
            output.append(shape.message(name, answer.text, answer.logprobs, status))
        output += [shape.call(call) for call in answer.calls]
        response = shape.ended(output, answer.finished, answer.reasoning_tokens)
        self._keep(shape, response)
        return response

    async def frames(
        self,
        asked: ResponsesRequest,
        admitted: Admitted,
        events: AsyncGenerator[AnswerEvent | ToolCallPart, None],
    ) -> AsyncGenerator[bytes, None]:
        shape = self._shape(asked, admitted)
        items = ItemStream(shape)
        async with aclosing(events):
            yield items.event("response.created", response=shape.begun())
            yield items.event("response.in_progress", response=shape.begun())
            try:
                async for event in events:
                    for each in self._framed(shape, items, event):
                        yield each
            except FabricError as error:
                failed = shape.failed(items.output, error)
                yield items.event("response.failed", response=failed)

    def _framed(
        self, shape: ResponseShape, items: ItemStream, event: AnswerEvent | ToolCallPart
    ) -> Sequence[bytes]:
        if isinstance(event, Delta):
            return list(items.say(event))
        if isinstance(event, ToolCallPart):
            return list(items.part(event))
        if isinstance(event, ToolCalls):
            return [each for call in event.calls for each in items.call(call)]
        is_cut = event.reason is FinishReason.LENGTH
        frames = list(items.end(is_cut=is_cut))
        response = shape.ended(items.output, event, items.reasoning_tokens)
        self._keep(shape, response)
        kind = "response.incomplete" if is_cut else "response.completed"
        return [*frames, items.event(kind, response=response)]

    def _keep(self, shape: ResponseShape, response: dict[str, Any]) -> None:
        asked, admitted = shape.asked, shape.admitted
        if not asked.keeps or asked.tenant is None:
            return
        read = {item["id"]: _read(item) for item in response["output"]}
        said = conversation(None, [*asked.said(), *read.values()])
        stored = StoredResponse(
            body=response,
            given=asked.given,
            messages=tuple(said),
            items=read,
            agent=admitted.agent,
            epoch=admitted.epoch,
        )
        self._store.put(asked.tenant, stored)

    def _shape(self, asked: ResponsesRequest, admitted: Admitted) -> ResponseShape:
        """Begin an answer, which is now the continuation of the one before."""
        if asked.previous is not None and asked.tenant is not None:
            stored = self._store.get(asked.tenant, asked.previous)
            if stored is not None:
                stored.is_continued = True
        return ResponseShape(asked, admitted, int(self._clock.wall_s()))


def _read(item: dict[str, Any]) -> Message:
    """Read an item of an answer as it would be read if it were sent back."""
    message = parse_item(Fields(item), ItemCount(JSON_ITEMS_MAX))
    assert isinstance(message, Message), "answers hold no references"
    return message
