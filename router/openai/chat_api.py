"""POST /v1/chat/completions, streaming and not."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.ports import Clock
from fabric.turn.generation import Admitted, Delta, Finished, TokenLogprob, ToolCall, ToolCalls
from router.fresh_ids import fresh_name, fresh_operation
from router.http.auth import tenant_of
from router.http.disconnect import unless_gone
from router.http.json_body import read_parsed
from router.http.sse import DONE, EventStream, frame
from router.openai.chat_request import ChatRequest, parse_chat
from router.openai.prefetch_header import expected_next
from router.turn_request import Turn
from router.turns.answer import Answer, gather, memory_headers, usage
from router.turns.open_turn import OpenTurn
from router.turns.turns import Turns


class ChatApi:
    """Chat completions as OpenAI spells them."""

    def __init__(self, turns: Turns, clock: Clock) -> None:
        self._turns = turns
        self._clock = clock

    def routes(self) -> list[Route]:
        """Return the routes of this API."""
        return [Route("/v1/chat/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Answer one chat request."""
        chat = await read_parsed(request, partial(parse_chat, request.headers))
        turn = Turn(
            operation=fresh_operation(),
            tenant=tenant_of(request),
            model=chat.model,
            identity=chat.identity,
            sampling=chat.sampling,
            prompt=chat.prompt,
            priority=chat.priority,
            prefetch=expected_next(request.headers),
        )
        opened = await unless_gone(request, self._turns.open(turn))
        headers = memory_headers(opened.admitted)
        shape = _Shape(chat, opened.admitted, int(self._clock.wall_s()))
        if chat.stream:
            return EventStream(_frames(shape, opened), headers, opened.close)
        try:
            answer = await unless_gone(request, gather(opened))
        finally:
            await opened.close()
        return JSONResponse(shape.completion(answer), headers=headers)


async def _frames(shape: "_Shape", opened: OpenTurn) -> AsyncGenerator[bytes, None]:
    calls_count = 0
    is_first = True
    async with aclosing(opened.events()) as events:
        async for event in events:
            if is_first:
                # Not before the first token: clients time it by their first chunk.
                yield frame(shape.chunk({"role": "assistant", "content": ""}))
                is_first = False
            if isinstance(event, Delta):
                if event.text or event.logprobs:
                    yield frame(shape.delta(event))
            elif isinstance(event, ToolCalls):
                for call in event.calls:
                    indexed = {"index": calls_count, **_call(call)}
                    yield frame(shape.chunk({"tool_calls": [indexed]}))
                    calls_count += 1
            else:
                for each in shape.ending(event):
                    yield frame(each)
                yield DONE


class _Shape:
    """The parts that all chunks of one answer share."""

    def __init__(self, chat: ChatRequest, admitted: Admitted, created_s: int) -> None:
        self._chat = chat
        self._admitted = admitted
        self._head = {
            "id": fresh_name("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": chat.model,
        }

    def completion(self, answer: Answer) -> dict[str, Any]:
        """Spell a whole answer."""
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
            "finish_reason": answer.reason.value,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(self._admitted, answer.completion_tokens),
        }

    def delta(self, event: Delta) -> dict[str, Any]:
        """Spell a piece of text."""
        name = "reasoning_content" if event.reasoning else "content"
        return self.chunk({name: event.text}, logprobs=self._logprobs(event.logprobs))

    def ending(self, event: Finished) -> list[dict[str, Any]]:
        """Spell why it ended and, where asked for, the usage."""
        last = [self.chunk({}, finish_reason=event.reason.value)]
        if self._chat.include_usage:
            counts = usage(self._admitted, event.completion_tokens)
            last.append({**self._head, "choices": [], "usage": counts})
        return last

    def chunk(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Spell one chunk."""
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._chat.include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._chat.sampling.logprobs is None:
            return None
        content = [
            {
                **_logprob(token.token, token.logprob),
                "top_logprobs": [_logprob(*rival) for rival in token.rivals],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": fresh_name("call_"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": logprob,
        "bytes": list(token.encode("utf-8", "surrogatepass")),
    }
