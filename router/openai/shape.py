"""What all parts of one answer share, whole or streamed, and how a stream ends."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from fabric.turn.generation import Admitted
from router.http.sse import frame
from router.openai.request import OpenAiRequest

DONE = b"data: [DONE]\n\n"


R = TypeVar("R", bound=OpenAiRequest)


class Shape(Generic[R]):
    """The request, its admission, and the head of each of its chunks."""

    reasoning_tokens: int | None = None  # None: the route knows no thoughts

    def __init__(self, asked: R, admitted: Admitted, name: str, kind: str, created_s: int) -> None:
        self.asked = asked
        self.head = {
            "id": name,
            "object": kind,
            "created": created_s,
            "model": asked.model,
            "system_fingerprint": admitted.system or None,
        }

    def usage(self, admitted: Sequence[Admitted], answer_tokens: Iterable[int]) -> dict[str, Any]:
        """Count tokens: each prompt's once, with those that were not computed again."""
        more: dict[str, Any] = {}
        if self.reasoning_tokens is not None:
            more["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        prompt_tokens = sum(each.prompt_tokens for each in admitted)
        completion_tokens = sum(answer_tokens)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(each.cached_tokens for each in admitted)
            },
            **more,
        }

    def ending(self, admitted: Sequence[Admitted], answer_tokens: Iterable[int]) -> Iterator[bytes]:
        """Frame what follows the last chunk: the usage, where asked for, and the end."""
        if self.asked.include_usage:
            usage = self.usage(admitted, answer_tokens)
            yield frame({**self.head, "choices": [], "usage": usage})
        yield DONE
