"""POST /v1/completions, streaming and not."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
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
from router.api.adapter import NumberedParts, SeveralAdapter
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT, frame
from router.openai.completion_request import CompletionRequest, parse_completion
from router.openai.errors import OpenAiErrors
from router.openai.shape import Shape
from router.turns.answer import WholeAnswer


class CompletionAdapter(OpenAiErrors, SeveralAdapter[CompletionRequest]):
    """Raw completions as OpenAI spells them."""

    path = "/v1/completions"
    idle = COMMENT

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> CompletionRequest:
        return parse_completion(headers, body)

    def all_whole(
        self,
        asked: CompletionRequest,
        admitted: Sequence[Admitted],
        answers: Sequence[WholeAnswer],
    ) -> dict[str, Any]:
        shape = self._shape(asked, admitted[0])
        choices = [
            shape.choice(index, answer) for index, answer in enumerate(shown(asked, answers))
        ]
        counts = (shape.tokens_of(answer.finished) for answer in answers)
        return {**shape.head, "choices": choices, "usage": shape.usage(admitted, counts)}

    async def all_frames(
        self,
        asked: CompletionRequest,
        admitted: Callable[[], Sequence[Admitted]],
        parts: NumberedParts,
    ) -> AsyncGenerator[bytes, None]:
        shape, counts = self._shape(asked, admitted()[0]), []
        async with aclosing(parts):
            async for index, event in parts:
                if isinstance(event, Delta) and (event.is_echo or not asked.only_reads):
                    yield frame(shape.chunk(index, event.text, event.logprobs))
                elif isinstance(event, Finished):
                    yield frame(shape.chunk(index, "", (), shape.reason_of(event)))
                    counts.append(shape.tokens_of(event))
        for each in shape.ending(admitted(), counts):
            yield each

    def _shape(self, asked: CompletionRequest, admitted: Admitted) -> "_TextShape":
        name, created_s = fresh_name("cmpl-"), int(self._clock.wall_s())
        return _TextShape(asked, admitted, name, "text_completion", created_s)


def shown(asked: CompletionRequest, answers: Sequence[WholeAnswer]) -> Iterable[WholeAnswer]:
    """Choose the most probable answers to each prompt, where more were made than are wanted."""
    several = asked.several
    if several is None:
        return answers
    found: list[WholeAnswer] = []
    for start in range(0, len(answers), several.count):
        made = answers[start : start + several.count]
        if several.shown < several.count:
            made = sorted(made, key=lambda answer: answer.mean_logprob, reverse=True)
        found += made[: several.shown]
    return found


class _TextShape(Shape[CompletionRequest]):
    """The choices of a completion; offsets count on from chunk to chunk."""

    def __init__(
        self, asked: CompletionRequest, admitted: Admitted, name: str, kind: str, created_s: int
    ) -> None:
        super().__init__(asked, admitted, name, kind, created_s)
        self._chars_count: defaultdict[int, int] = defaultdict(int)

    def choice(self, index: int, answer: WholeAnswer) -> dict[str, Any]:
        text, logprobs = answer.echo, answer.echo_logprobs
        if not self.asked.only_reads:
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
        return (FinishReason.LENGTH if self.asked.only_reads else finished.reason).value

    def tokens_of(self, finished: Finished) -> int:
        return 0 if self.asked.only_reads else finished.completion_tokens

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
        if self.asked.sampling.logprobs is None:
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
    """List the alternatives, and the token itself, as OpenAI does; a prompt's first has none."""
    if token.logprob is None:
        return None
    return {**dict(token.alternatives), token.token: token.logprob}
