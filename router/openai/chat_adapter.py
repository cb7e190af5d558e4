"""POST /v1/chat/completions, streaming and not."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fabric.ports import Clock
from fabric.turn.generation import (
    Admitted,
    Delta,
    Finished,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    ToolCalls,
)
from router.api.adapter import ApiAdapter
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT, frame
from router.openai.chat_request import parse_chat
from router.openai.errors import OpenAiErrors
from router.openai.logprobs import logprob_form
from router.openai.request import OpenAiRequest
from router.openai.shape import Shape
from router.turns.answer import WholeAnswer
from router.turns.open_turn import Answered


class ChatAdapter(OpenAiErrors, ApiAdapter[OpenAiRequest]):
    """Chat completions as OpenAI spells them."""

    path = "/v1/chat/completions"
    idle = COMMENT
    streams_calls = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> OpenAiRequest:
        return parse_chat(headers, body)

    def whole(
        self, asked: OpenAiRequest, admitted: Admitted, answer: WholeAnswer
    ) -> dict[str, Any]:
        return self._shape(asked, admitted).completion(answer)

    async def frames(
        self,
        asked: OpenAiRequest,
        admitted: Admitted,
        events: AsyncGenerator[Answered | ToolCallPart, None],
    ) -> AsyncGenerator[bytes, None]:
        shape, calls = self._shape(asked, admitted), _CallStream()
        is_first = True
        async with aclosing(events):
            async for event in events:
                if is_first:
                    # Not before the first token: clients time it by their first chunk.
                    yield frame(shape.chunk({"role": "assistant", "content": ""}))
                    is_first = False
                if isinstance(event, Delta):
                    if event.text or event.logprobs:
                        yield frame(shape.delta(event))
                elif isinstance(event, ToolCallPart):
                    yield frame(shape.chunk({"tool_calls": [calls.part(event)]}))
                elif isinstance(event, ToolCalls):
                    for indexed in calls.whole(event):
                        yield frame(shape.chunk({"tool_calls": [indexed]}))
                else:
                    ended = shape.chunk({}, finish_reason=event.reason.value)
                    ended["choices"][0] |= _broken(event)
                    yield frame(ended)
                    for each in shape.ending(event):
                        yield each

    def _shape(self, asked: OpenAiRequest, admitted: Admitted) -> "_ChatShape":
        name, created_s = fresh_name("chatcmpl-"), int(self._clock.wall_s())
        return _ChatShape(asked, admitted, name, "chat.completion.chunk", created_s)


class _CallStream:
    """Numbers calls as they begin, and tells those in whole that were not told in parts."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def part(self, part: ToolCallPart) -> dict[str, Any]:
        number = self._numbers.get(part.id)
        if number is not None:
            return {"index": number, "function": {"arguments": part.arguments}}
        self._numbers[part.id] = number = len(self._numbers)
        return {"index": number, **_call(ToolCall(part.name, part.arguments, part.id))}

    def whole(self, event: ToolCalls) -> Iterator[dict[str, Any]]:
        for call in event.calls:
            if not call.id or call.id not in self._numbers:
                number = len(self._numbers)
                self._numbers[call.id or f"unnamed {number}"] = number
                yield {"index": number, **_call(call)}


class _ChatShape(Shape):
    """The choices of a chat's answer."""

    reasoning_tokens = 0

    def completion(self, answer: WholeAnswer) -> dict[str, Any]:
        self.reasoning_tokens = answer.reasoning_tokens
        has_text = bool(answer.text) or not answer.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if has_text else None,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finished.reason.value,
            **_broken(answer.finished),
        }
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self.usage(answer.finished),
        }

    def delta(self, event: Delta) -> dict[str, Any]:
        name = "reasoning_content" if event.reasoning else "content"
        if event.reasoning:
            self.reasoning_tokens = event.index + 1
        return self.chunk({name: event.text}, logprobs=self._logprobs(event.logprobs))

    def chunk(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk: dict[str, Any] = {**self.head, "choices": [choice]}
        if self.asked.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.asked.sampling.logprobs is None:
            return None
        return {"content": [logprob_form(token) for token in tokens], "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or fresh_name("call_"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _broken(finished: Finished) -> dict[str, Any]:
    """Say, in a field of our own, that the text has calls that were cut or malformed."""
    count = finished.broken_calls
    return {"macfabric": {"broken_tool_calls": count}} if count else {}
