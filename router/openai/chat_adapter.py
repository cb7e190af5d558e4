"""POST /v1/chat/completions, streaming and not."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
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
from router.api.adapter import NumberedParts, SeveralAdapter
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT, frame
from router.openai.chat_request import ChatRequest, parse_chat
from router.openai.custom_tools import custom_text
from router.openai.errors import OpenAiErrors
from router.openai.logprobs import logprob_form
from router.openai.shape import Shape
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent


class ChatAdapter(OpenAiErrors, SeveralAdapter[ChatRequest]):
    """Chat completions as OpenAI spells them."""

    path = "/v1/chat/completions"
    idle = COMMENT
    streams_calls = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> ChatRequest:
        return parse_chat(headers, body)

    def all_whole(
        self, asked: ChatRequest, admitted: Sequence[Admitted], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        return self._shape(asked, admitted[0]).completion(admitted, answers)

    async def all_frames(
        self, asked: ChatRequest, admitted: Callable[[], Sequence[Admitted]], parts: NumberedParts
    ) -> AsyncGenerator[bytes, None]:
        shape = self._shape(asked, admitted()[0])
        custom = asked.custom_tools
        choices: defaultdict[int, _ChoiceStream] = defaultdict(lambda: _ChoiceStream(custom))
        async with aclosing(parts):
            async for index, event in parts:
                for told in choices[index].told(event):
                    yield frame(shape.chunk(index, told))
        shape.reasoning_tokens = sum(each.reasoning_tokens for each in choices.values())
        for each in shape.ending(admitted(), (each.tokens_count for each in choices.values())):
            yield each

    def _shape(self, asked: ChatRequest, admitted: Admitted) -> "_ChatShape":
        name, created_s = fresh_name("chatcmpl-"), int(self._clock.wall_s())
        return _ChatShape(asked, admitted, name, "chat.completion.chunk", created_s)


@dataclass(frozen=True, slots=True)
class _Told:
    """Changes of a choice in one chunk."""

    delta: dict[str, Any]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finished: Finished | None = None


class _ChoiceStream:
    """One choice as it comes."""

    def __init__(self, custom_tools: frozenset[str]) -> None:
        self._calls = _CallStream(custom_tools)
        self._has_begun = False
        self.reasoning_tokens = 0
        self.tokens_count = 0

    def told(self, event: AnswerEvent | ToolCallPart) -> Iterator[_Told]:
        if not self._has_begun:
            # Not before the first token: clients time it by their first chunk.
            self._has_begun = True
            yield _Told({"role": "assistant", "content": ""})
        if isinstance(event, Delta):
            if event.reasoning:
                self.reasoning_tokens = event.index + 1
            if event.text or event.logprobs:
                name = "reasoning_content" if event.reasoning else "content"
                yield _Told({name: event.text}, event.logprobs)
        elif isinstance(event, ToolCallPart):
            for part in self._calls.part(event):
                yield _Told({"tool_calls": [part]})
        elif isinstance(event, ToolCalls):
            for indexed in self._calls.whole(event):
                yield _Told({"tool_calls": [indexed]})
        else:
            self.tokens_count = event.completion_tokens
            yield _Told({}, finished=event)


class _CallStream:
    """Numbers calls as they begin, and tells those in whole that were not told in parts.

    Those of custom tools are: their text stands within what is being written.
    """

    def __init__(self, custom_tools: frozenset[str]) -> None:
        self._custom = custom_tools
        self._numbers: dict[str, int] = {}

    def part(self, part: ToolCallPart) -> Iterator[dict[str, Any]]:
        number = self._numbers.get(part.id)
        if number is not None:
            yield {"index": number, "function": {"arguments": part.arguments}}
        elif part.name and part.name not in self._custom:
            self._numbers[part.id] = number = len(self._numbers)
            call = ToolCall(part.name, part.arguments, part.id)
            yield {"index": number, **_call(call, self._custom)}

    def whole(self, event: ToolCalls) -> Iterator[dict[str, Any]]:
        for call in event.calls:
            if not call.id or call.id not in self._numbers:
                number = len(self._numbers)
                self._numbers[call.id or f"unnamed {number}"] = number
                yield {"index": number, **_call(call, self._custom)}


class _ChatShape(Shape[ChatRequest]):
    """The choices of a chat's answer."""

    reasoning_tokens = 0

    def completion(
        self, admitted: Sequence[Admitted], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        self.reasoning_tokens = sum(answer.reasoning_tokens for answer in answers)
        counts = (answer.finished.completion_tokens for answer in answers)
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": self.usage(admitted, counts),
        }

    def _choice(self, index: int, answer: WholeAnswer) -> dict[str, Any]:
        has_text = bool(answer.text) or not answer.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.text if has_text else None,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            custom = self.asked.custom_tools
            message["tool_calls"] = [_call(call, custom) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finished.reason.value,
            **_broken(answer.finished),
        }

    def chunk(self, index: int, told: _Told) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": told.delta,
            "logprobs": self._logprobs(told.logprobs),
            "finish_reason": told.finished.reason.value if told.finished is not None else None,
            **(_broken(told.finished) if told.finished is not None else {}),
        }
        chunk: dict[str, Any] = {**self.head, "choices": [choice]}
        if self.asked.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if tokens is None or self.asked.sampling.logprobs is None:
            return None
        return {"content": [logprob_form(token) for token in tokens], "refusal": None}


def _call(call: ToolCall, custom_tools: frozenset[str]) -> dict[str, Any]:
    head = {"id": call.id or fresh_name("call_")}
    if call.name in custom_tools:
        return {**head, "type": "custom", "custom": {"name": call.name, "input": custom_text(call)}}
    function = {"name": call.name, "arguments": call.arguments}
    return {**head, "type": "function", "function": function}


def _broken(finished: Finished) -> dict[str, Any]:
    """Say, in a field of our own, that the text has calls that were cut or malformed."""
    count = finished.broken_calls
    return {"macfabric": {"broken_tool_calls": count}} if count else {}
