"""POST /v1/completions, streaming and not."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.ports import Clock
from fabric.turn.generation import Admitted, Delta, Finished, TokenLogprob
from router.fresh_ids import fresh_name, fresh_operation
from router.http.auth import tenant_of
from router.http.disconnect import unless_gone
from router.http.json_body import read_parsed
from router.http.sse import DONE, EventStream, frame
from router.openai.completion_request import CompletionRequest, parse_completion
from router.openai.prefetch_header import expected_next
from router.turn_request import Turn
from router.turns.answer import gather, memory_headers, usage
from router.turns.open_turn import OpenTurn
from router.turns.turns import Turns


class CompletionApi:
    """Raw completions as OpenAI spells them."""

    def __init__(self, turns: Turns, clock: Clock) -> None:
        self._turns = turns
        self._clock = clock

    def routes(self) -> list[Route]:
        """Return the routes of this API."""
        return [Route("/v1/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Continue one prompt."""
        asked = await read_parsed(request, partial(parse_completion, request.headers))
        turn = Turn(
            operation=fresh_operation(),
            tenant=tenant_of(request),
            model=asked.model,
            identity=asked.identity,
            sampling=asked.sampling,
            prompt=asked.prompt,
            priority=asked.priority,
            prefetch=expected_next(request.headers),
        )
        opened = await unless_gone(request, self._turns.open(turn))
        headers = memory_headers(opened.admitted)
        shape = _Shape(asked, opened.admitted, int(self._clock.wall_s()))
        if asked.stream:
            return EventStream(_frames(shape, opened), headers, opened.close)
        try:
            answer = await unless_gone(request, gather(opened))
        finally:
            await opened.close()
        text = answer.reasoning + answer.text
        body = shape.chunk(text, answer.logprobs, answer.reason.value)
        counts = usage(opened.admitted, answer.completion_tokens)
        return JSONResponse({**body, "usage": counts}, headers=headers)


async def _frames(shape: "_Shape", opened: OpenTurn) -> AsyncGenerator[bytes, None]:
    async with aclosing(opened.events()) as events:
        async for event in events:
            if isinstance(event, Delta):
                yield frame(shape.chunk(event.text, event.logprobs, None))
            elif isinstance(event, Finished):
                for each in shape.ending(event):
                    yield frame(each)
                yield DONE


class _Shape:
    """The parts that all chunks of one completion share."""

    def __init__(self, asked: CompletionRequest, admitted: Admitted, created_s: int) -> None:
        self._asked = asked
        self._admitted = admitted
        self._chars_count = 0
        self._head = {
            "id": fresh_name("cmpl-"),
            "object": "text_completion",
            "created": created_s,
            "model": asked.model,
        }

    def chunk(
        self, text: str, tokens: Sequence[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        """Spell a piece of text, or all of it."""
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        return {**self._head, "choices": [choice]}

    def ending(self, event: Finished) -> list[dict[str, Any]]:
        """Spell why it ended and, where asked for, the usage."""
        last = [self.chunk("", (), event.reason.value)]
        if self._asked.include_usage:
            counts = usage(self._admitted, event.completion_tokens)
            last.append({**self._head, "choices": [], "usage": counts})
        return last

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._asked.sampling.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._chars_count)
            self._chars_count += len(token.token)
        return {
            "tokens": [token.token for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.rivals) for token in tokens],
            "text_offset": offsets,
        }
