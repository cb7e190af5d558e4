"""POST /v1/completions, streaming and not."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from fabric.ports import Clock
from fabric.turn.generation import (
    Admitted,
    Delta,
    Finished,
    FinishReason,
    TokenLogprob,
)
from router.api.adapter import BatchAdapter, NumberedParts
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT, frame
from router.openai.completion_request import CompletionRequest, parse_completion
from router.openai.shape import OpenAiErrors, Shape
from router.turns.answer import WholeAnswer


class CompletionAdapter(OpenAiErrors, BatchAdapter[CompletionRequest]):
    """Dialect of POST /v1/completions."""

    path = "/v1/completions"
    idle = COMMENT
    parse = staticmethod(parse_completion)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def all_whole(
        self,
        request: CompletionRequest,
        admitted: Sequence[Admitted],
        answers: Sequence[WholeAnswer],
    ) -> dict[str, Any]:
        shape = self._shape(request, admitted[0])
        choices = [
            shape.choice(index, answer) for index, answer in enumerate(shown(request, answers))
        ]
        counts = (shape.tokens_of(answer.finished) for answer in answers)
        return {**shape.head, "choices": choices, "usage": shape.usage(admitted, counts)}

    async def all_frames(
        self,
        request: CompletionRequest,
        admitted: Callable[[], Sequence[Admitted]],
        parts: NumberedParts,
    ) -> AsyncGenerator[bytes, None]:
        shape, counts = self._shape(request, admitted()[0]), []
        async with aclosing(parts):
            async for index, event in parts:
                if isinstance(event, Delta) and (event.is_echo or not request.only_reads):
                    yield frame(shape.chunk(index, event.text, event.logprobs))
                elif isinstance(event, Finished):
                    yield frame(shape.chunk(index, "", (), shape.reason_of(event)))
                    counts.append(shape.tokens_of(event))
        for last in shape.ending(admitted(), counts):
            yield last

    def _shape(self, request: CompletionRequest, admitted: Admitted) -> "_TextShape":
        name, created_s = fresh_name("cmpl-"), int(self._clock.wall_s())
        return _TextShape(request, admitted, name, "text_completion", created_s)


def shown(request: CompletionRequest, answers: Sequence[WholeAnswer]) -> Iterable[WholeAnswer]:
    """Return the most probable answers to each prompt, if more were generated than are shown."""
    batch = request.batch
    if batch is None:
        return answers
    best: list[WholeAnswer] = []
    for start in range(0, len(answers), batch.count):
        group = answers[start : start + batch.count]
        if batch.shown < batch.count:
            group = sorted(group, key=lambda answer: answer.mean_logprob, reverse=True)
        best += group[: batch.shown]
    return best


class _TextShape(Shape[CompletionRequest]):
    """Choices of a completion, with offsets that continue from chunk to chunk."""

    def __init__(
        self, request: CompletionRequest, admitted: Admitted, name: str, kind: str, created_s: int
    ) -> None:
        super().__init__(request, admitted, name, kind, created_s)
        self._chars_count: defaultdict[int, int] = defaultdict(int)

    def choice(self, index: int, answer: WholeAnswer) -> dict[str, Any]:
        text, logprobs = answer.echo, answer.echo_logprobs
        if not self.request.only_reads:
            text, logprobs = text + answer.reasoning + answer.text, logprobs + answer.logprobs
        return self._choice(index, text, logprobs, self.reason_of(answer.finished))

    def chunk(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenLogprob],
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {**self.head, "choices": [self._choice(index, text, tokens, finish_reason)]}

    def reason_of(self, finished: Finished) -> str:
        return (FinishReason.LENGTH if self.request.only_reads else finished.reason).value

    def tokens_of(self, finished: Finished) -> int:
        return 0 if self.request.only_reads else finished.completion_tokens

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenLogprob],
        finish_reason: str | None,
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._chars_count[index])
            self._chars_count[index] += len(token.token)
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": offsets,
        }


def _likeliest(token: TokenLogprob) -> dict[str, float] | None:
    """Return a token and its alternatives, as OpenAI does; None for a prompt's first token."""
    if token.logprob is None:
        return None
    return {**dict(token.alternatives), token.token: token.logprob}
