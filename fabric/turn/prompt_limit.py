"""Limit of a prompt's length, checked before it is encoded and meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from fabric.errors import HungUpError, RejectedError
from fabric.limits import BODY_BYTES_MAX


def prompt_bytes_max(tokens_max: int, token_reach_bytes: int | None) -> int:
    """Return the size of text that no prompt within the context reaches.

    At most that of a body, which contains the prompt.
    """
    if token_reach_bytes is None:
        return BODY_BYTES_MAX
    return min(BODY_BYTES_MAX, tokens_max * token_reach_bytes)


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Limit of one prompt's length, and whether its tokens are still wanted.

    A prompt of `tokens_max` tokens or more is refused: the answer needs one, too.
    """

    tokens_max: int
    token_reach_bytes: int | None  # of text that one token may stand for; None: any number
    is_unwanted: Callable[[], bool] = lambda: False
    passed_tokens: int = 0  # before the text that is encoded

    def behind(self, tokens_count: int) -> "PromptLimit":
        """Return the limit for what follows that many tokens."""
        return replace(self, passed_tokens=self.passed_tokens + tokens_count)

    def left(self, tokens_count: int) -> int:
        """Return how many more than `tokens_count` reach the limit."""
        return self.tokens_max - self.passed_tokens - tokens_count

    def check_bytes(self, size_bytes: int) -> None:
        """Raise RejectedError if no tokens within the limit can hold so much text."""
        reach_bytes = self.token_reach_bytes
        if reach_bytes is not None and size_bytes >= self.tokens_max * reach_bytes:
            self._refuse(f"is {size_bytes} bytes long")

    def check(self, tokens_count: int) -> None:
        """Raise RejectedError once that many tokens reach the limit, HungUpError if unwanted."""
        if self.is_unwanted():
            raise HungUpError
        if self.left(tokens_count) <= 0:
            self._refuse(f"has {self.passed_tokens + tokens_count} tokens or more")

    def _refuse(self, what: str) -> NoReturn:
        message = (
            f"this model's maximum context length is {self.tokens_max} tokens, but the prompt "
            f"{what}: shorten the conversation"
        )
        raise RejectedError(message, code="context_length_exceeded", param="messages")
