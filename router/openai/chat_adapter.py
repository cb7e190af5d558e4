"""POST /v1/chat/completions, streaming and not."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
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
from router.api.adapter import BatchAdapter, NumberedParts
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT, TextFrames, frame
from router.openai.chat_request import ChatRequest, parse_chat
from router.openai.custom_tools import custom_text
from router.openai.shape import OpenAiErrors, Shape, logprob_form
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent


class ChatAdapter(OpenAiErrors, BatchAdapter[ChatRequest]):
    """Dialect of POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    idle = COMMENT
    parse = staticmethod(parse_chat)
    streams_calls = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def all_whole(
        self, request: ChatRequest, admitted: Sequence[Admitted], answers: Sequence[WholeAnswer]
    ) -> dict[str, Any]:
        return self._shape(request, admitted[0]).completion(admitted, answers)

    async def all_frames(
        self, request: ChatRequest, admitted: Callable[[], Sequence[Admitted]], parts: NumberedParts
    ) -> AsyncGenerator[bytes, None]:
        shape = self._shape(request, admitted()[0])
        custom = request.custom_tools
        choices: defaultdict[int, _ChoiceStream] = defaultdict(lambda: _ChoiceStream(custom))
        async with aclosing(parts):
            async for index, event in parts:
                for change in choices[index].changes(event):
                    yield shape.frame(index, change)
        shape.reasoning_tokens = sum(choice.reasoning_tokens for choice in choices.values())
        counts = (choice.tokens_count for choice in choices.values())
        for last in shape.ending(admitted(), counts):
            yield last

    def _shape(self, request: ChatRequest, admitted: Admitted) -> "_ChatShape":
        name, created_s = fresh_name("chatcmpl-"), int(self._clock.wall_s())
        return _ChatShape(request, admitted, name, "chat.completion.chunk", created_s)


@dataclass(frozen=True, slots=True)
class _Change:
    """Change of a choice, sent as one chunk."""

    delta: dict[str, Any]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finished: Finished | None = None


class _ChoiceStream:
    """One choice while it is generated."""

    def __init__(self, custom_tools: frozenset[str]) -> None:
        self._calls = _CallStream(custom_tools)
        self._has_begun = False
        self.reasoning_tokens = 0
        self.tokens_count = 0

    def changes(self, event: AnswerEvent | ToolCallPart) -> Iterator[_Change]:
        if not self._has_begun:
            # Sent with the first token: clients measure TTFT by their first chunk.
            self._has_begun = True
            yield _Change({"role": "assistant", "content": ""})
        if isinstance(event, Delta):
            if event.reasoning:
                self.reasoning_tokens = event.index + 1
            if event.text or event.logprobs:
                name = "reasoning_content" if event.reasoning else "content"
                yield _Change({name: event.text}, event.logprobs)
        elif isinstance(event, ToolCallPart):
            for part in self._calls.part(event):
                yield _Change({"tool_calls": [part]})
        elif isinstance(event, ToolCalls):
            for indexed in self._calls.whole(event):
                yield _Change({"tool_calls": [indexed]})
        else:
            self.tokens_count = event.completion_tokens
            yield _Change({}, finished=event)


class _CallStream:
    """Chunks of calls, numbered as they begin.

    Calls of custom tools are sent whole: their text is within the arguments.
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
    """Whole and streamed choices of a chat."""

    reasoning_tokens = 0

    def __init__(
        self, request: ChatRequest, admitted: Admitted, name: str, kind: str, created_s: int
    ) -> None:
        super().__init__(request, admitted, name, kind, created_s)
        self._texts: dict[tuple[int, str], TextFrames] = {}  # by choice and field

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
            custom = self.request.custom_tools
            message["tool_calls"] = [_call(call, custom) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finished.reason.value,
            **_broken(answer.finished),
        }

    def frame(self, index: int, change: _Change) -> bytes:
        """Return the frame of one chunk."""
        name, text = next(iter(change.delta.items()), ("", None))
        has_logprobs = self.request.sampling.logprobs is not None
        if len(change.delta) != 1 or not isinstance(text, str) or has_logprobs:
            return frame(self.chunk(index, change))
        frames = self._texts.get((index, name))
        if frames is None:
            frames = TextFrames(lambda text: frame(self.chunk(index, _Change({name: text}))))
            self._texts[index, name] = frames
        return frames.frame(text)

    def chunk(self, index: int, change: _Change) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": change.delta,
            "logprobs": self._logprobs(change.logprobs),
            "finish_reason": change.finished.reason.value if change.finished is not None else None,
            **(_broken(change.finished) if change.finished is not None else {}),
        }
        chunk: dict[str, Any] = {**self.head, "choices": [choice]}
        if self.request.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if tokens is None or self.request.sampling.logprobs is None:
            return None
        return {"content": [logprob_form(token) for token in tokens], "refusal": None}


def _call(call: ToolCall, custom_tools: frozenset[str]) -> dict[str, Any]:
    head = {"id": call.id or fresh_name("call_")}
    if call.name in custom_tools:
        return {**head, "type": "custom", "custom": {"name": call.name, "input": custom_text(call)}}
    function = {"name": call.name, "arguments": call.arguments}
    return {**head, "type": "function", "function": function}


def _broken(finished: Finished) -> dict[str, Any]:
    """Return a field that counts calls which were cut or malformed."""
    count = finished.broken_calls
    return {"macfabric": {"broken_tool_calls": count}} if count else {}
