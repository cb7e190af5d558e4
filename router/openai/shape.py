"""What all parts of one answer share, whole or streamed, and how a stream ends."""

from typing import Any

from fabric.turn.generation import Admitted, Finished
from router.http.sse import frame
from router.openai.request import OpenAiRequest

DONE = b"data: [DONE]\n\n"


class Shape:
    """The request, its admission, and the head of each of its chunks."""

    reasoning_tokens: int | None = None  # None: the route knows no thoughts

    def __init__(
        self, asked: OpenAiRequest, admitted: Admitted, name: str, kind: str, created_s: int
    ) -> None:
        self.asked = asked
        self._admitted = admitted
        self.head = {"id": name, "object": kind, "created": created_s, "model": asked.model}

    def usage(self, finished: Finished) -> dict[str, Any]:
        """Count tokens, with those that were not computed again, and a chat's of thoughts."""
        more: dict[str, Any] = {}
        if self.reasoning_tokens is not None:
            more["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        prompt_tokens, completion_tokens = self._admitted.prompt_tokens, finished.completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._admitted.cached_tokens},
            **more,
        }

    def ending(self, finished: Finished) -> list[bytes]:
        """Frame what follows the last chunk: the usage, where asked for, and the end."""
        if not self.asked.include_usage:
            return [DONE]
        usage = self.usage(finished)
        return [frame({**self.head, "choices": [], "usage": usage}), DONE]
