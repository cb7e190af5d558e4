"""POST /v1/completions, streaming and not."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fabric.ports import Clock
from fabric.turn.generation import Admitted, Delta, Finished, TokenLogprob
from router.api.adapter import ApiAdapter
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT, frame
from router.openai.completion_request import parse_completion
from router.openai.errors import OpenAiErrors
from router.openai.request import OpenAiRequest
from router.openai.shape import Shape
from router.turns.answer import WholeAnswer
from router.turns.open_turn import Answered


class CompletionAdapter(OpenAiErrors, ApiAdapter[OpenAiRequest]):
    """Raw completions as OpenAI spells them."""

    path = "/v1/completions"
    idle = COMMENT

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> OpenAiRequest:
        return parse_completion(headers, body)

    def whole(
        self, asked: OpenAiRequest, admitted: Admitted, answer: WholeAnswer
    ) -> dict[str, Any]:
        shape = self._shape(asked, admitted)
        text, finished = answer.reasoning + answer.text, answer.finished
        body = shape.chunk(text, answer.logprobs, finished.reason.value)
        return {**body, "usage": shape.usage(finished)}

    async def frames(
        self, asked: OpenAiRequest, admitted: Admitted, events: AsyncGenerator[Answered, None]
    ) -> AsyncGenerator[bytes, None]:
        shape = self._shape(asked, admitted)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    yield frame(shape.chunk(event.text, event.logprobs, None))
                elif isinstance(event, Finished):
                    yield frame(shape.chunk("", (), event.reason.value))
                    for each in shape.ending(event):
                        yield each

    def _shape(self, asked: OpenAiRequest, admitted: Admitted) -> "_TextShape":
        name, created_s = fresh_name("cmpl-"), int(self._clock.wall_s())
        return _TextShape(asked, admitted, name, "text_completion", created_s)


class _TextShape(Shape):
    """The choices of a completion; offsets count on from chunk to chunk."""

    _chars_count = 0

    def chunk(
        self, text: str, tokens: Sequence[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        return {**self.head, "choices": [choice]}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.asked.sampling.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._chars_count)
            self._chars_count += len(token.token)
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.alternatives) for token in tokens],
            "text_offset": offsets,
        }
