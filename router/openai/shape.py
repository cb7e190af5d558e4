"""Answers and errors in OpenAI's dialect, whole and streamed."""

from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from fabric.errors import FabricError
from fabric.turn.generation import Admitted, TokenLogprob
from router.http.errors import ErrorBody, status_of
from router.http.sse import frame
from router.openai.request import OpenAiRequest

DONE = b"data: [DONE]\n\n"


R = TypeVar("R", bound=OpenAiRequest)


class Shape(Generic[R]):
    """Head of an answer's chunks, and its usage."""

    reasoning_tokens: int | None = None  # None: the route has no reasoning

    def __init__(
        self, request: R, admitted: Admitted, name: str, kind: str, created_s: int
    ) -> None:
        self.request = request
        self.head = {
            "id": name,
            "object": kind,
            "created": created_s,
            "model": request.model,
            "system_fingerprint": admitted.system or None,
        }

    def usage(self, admitted: Sequence[Admitted], answer_tokens: Iterable[int]) -> dict[str, Any]:
        """Return token counts; a prompt counts once for all of its answers."""
        more: dict[str, Any] = {}
        if self.reasoning_tokens is not None:
            more["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        prompt_tokens = sum(turn.prompt_tokens for turn in admitted)
        completion_tokens = sum(answer_tokens)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(turn.cached_tokens for turn in admitted)
            },
            **more,
        }

    def ending(self, admitted: Sequence[Admitted], answer_tokens: Iterable[int]) -> Iterator[bytes]:
        """Yield the frames after the last chunk: the usage, if requested, and the end."""
        if self.request.include_usage:
            usage = self.usage(admitted, answer_tokens)
            yield frame({**self.head, "choices": [], "usage": usage})
        yield DONE


def logprob_form(token: TokenLogprob) -> dict[str, Any]:
    """Return the log probability of a token, with its alternatives."""
    alternatives = [_alone(*alternative) for alternative in token.alternatives]
    return {**_alone(token.token, token.logprob), "top_logprobs": alternatives}


def _alone(token: str, logprob: float | None) -> dict[str, Any]:
    spelled = list(token.encode("utf-8", "surrogatepass"))
    return {"token": token, "logprob": logprob, "bytes": spelled}


_CLIENT_ERRORS = range(400, 500)


class OpenAiErrors:
    """Errors of every route."""

    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        status = status_of(error)
        kind = "invalid_request_error" if status in _CLIENT_ERRORS else "server_error"
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        body = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
        return ErrorBody({"error": body})
