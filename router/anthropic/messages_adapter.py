"""POST /v1/messages, streaming and not."""

from collections.abc import AsyncGenerator
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
from router.anthropic.dialect import AnthropicErrors
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
    """Dialect of POST /v1/messages."""

    path = "/v1/messages"
    streams_calls = True
    idle = named({"type": "ping"})
    parse = staticmethod(parse_request)

    def whole(
        self, request: AnthropicRequest, admitted: Admitted, answer: WholeAnswer
    ) -> dict[str, Any]:
        shape = MessageShape(request, admitted)
        if request.only_warms:
            return shape.message([], Finished(FinishReason.LENGTH, 0))
        content = []
        if answer.reasoning and request.shows_thoughts:
            content.append(thinking_block(answer.reasoning))
        # Clients send blocks back, and a block of blanks alone is refused.
        if answer.text.strip() or not answer.calls:
            content.append(text_block(answer.text))
        content += [tool_use_block(call, arguments_of(call)) for call in answer.calls]
        return shape.message(content, answer.finished)

    async def frames(
        self,
        request: AnthropicRequest,
        admitted: Admitted,
        events: AsyncGenerator[AnswerEvent | ToolCallPart, None],
    ) -> AsyncGenerator[bytes, None]:
        shape = MessageShape(request, admitted)
        blocks = BlockStream(shows_thoughts=request.shows_thoughts)
        async with aclosing(events):
            yield named({"type": "message_start", "message": shape.message([], None)})
            yield self.idle
            async for event in events:
                if isinstance(event, Delta):
                    for piece in blocks.add_delta(event):
                        yield piece
                elif isinstance(event, ToolCallPart):
                    for piece in blocks.add_call_part(event):
                        yield piece
                elif isinstance(event, ToolCalls):
                    for piece in chain.from_iterable(map(blocks.add_call, event.calls)):
                        yield piece
                else:
                    for piece in blocks.end():
                        yield piece
                    ended = {"delta": shape.ending(event), "usage": shape.usage(event)}
                    managed = shape.management(event)
                    yield named({"type": "message_delta", **ended, **managed})
                    yield named({"type": "message_stop"})
