"""POST /v1/messages, streaming and not."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from itertools import chain
from typing import Any

from fabric.turn.generation import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    ToolCallPart,
    ToolCalls,
)
from router.anthropic.errors import AnthropicErrors
from router.anthropic.request import AnthropicRequest, parse_request
from router.anthropic.shape import (
    MessageShape,
    arguments_of,
    text_block,
    thinking_block,
    tool_use_block,
)
from router.anthropic.stream import BlockStream, named
from router.api.adapter import ApiAdapter
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent


class MessagesAdapter(AnthropicErrors, ApiAdapter[AnthropicRequest]):
    """Messages as Anthropic spells them."""

    path = "/v1/messages"
    streams_calls = True
    idle = named({"type": "ping"})

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> AnthropicRequest:
        return parse_request(headers, body)

    def whole(
        self, asked: AnthropicRequest, admitted: Admitted, answer: WholeAnswer
    ) -> dict[str, Any]:
        shape = MessageShape(asked, admitted)
        if asked.only_warms:
            return shape.message([], Finished(FinishReason.LENGTH, 0))
        content = []
        if answer.reasoning and asked.shows_thoughts:
            content.append(thinking_block(answer.reasoning))
        # A block of blanks alone is refused where it is sent back.
        if answer.text.strip() or not answer.calls:
            content.append(text_block(answer.text))
        content += [tool_use_block(call, arguments_of(call)) for call in answer.calls]
        return shape.message(content, answer.finished)

    async def frames(
        self,
        asked: AnthropicRequest,
        admitted: Admitted,
        events: AsyncGenerator[AnswerEvent | ToolCallPart, None],
    ) -> AsyncGenerator[bytes, None]:
        shape = MessageShape(asked, admitted)
        blocks = BlockStream(shows_thoughts=asked.shows_thoughts)
        async with aclosing(events):
            yield named({"type": "message_start", "message": shape.message([], None)})
            yield self.idle
            async for event in events:
                if isinstance(event, Delta):
                    for each in blocks.say(event):
                        yield each
                elif isinstance(event, ToolCallPart):
                    for each in blocks.part(event):
                        yield each
                elif isinstance(event, ToolCalls):
                    for each in chain.from_iterable(map(blocks.call, event.calls)):
                        yield each
                else:
                    for each in blocks.end():
                        yield each
                    ended = {"delta": shape.ending(event), "usage": shape.usage(event)}
                    managed = shape.management(event)
                    yield named({"type": "message_delta", **ended, **managed})
                    yield named({"type": "message_stop"})
