"""How long a prompt may be, found out before it is encoded, or while it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

from fabric.errors import FabricError, RejectedError


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """One prompt's limit, and whether anybody still wants to know its tokens.

    A prompt of `tokens_max` tokens or more is refused: the answer needs one, too.
    """

    tokens_max: int
    token_bytes_max: int  # of the longest token there is
    is_unwanted: Callable[[], bool] = lambda: False
    passed_tokens: int = 0  # in front of what is encoded

    def behind(self, tokens_count: int) -> "PromptLimit":
        """Return the limit for what follows that many tokens."""
        return replace(self, passed_tokens=self.passed_tokens + tokens_count)

    def left(self, tokens_count: int) -> int:
        """Return how many more than `tokens_count` reach the limit."""
        return self.tokens_max - self.passed_tokens - tokens_count

    def check_bytes(self, size_bytes: int) -> None:
        """Raise RejectedError where no tokens are long enough to hold so much text."""
        if size_bytes >= self.tokens_max * self.token_bytes_max:
            self._refuse(f"is {size_bytes} bytes long")

    def check(self, tokens_count: int) -> None:
        """Raise RejectedError once that many tokens reach the limit, FabricError if unwanted."""
        if self.is_unwanted():
            message = "the client hung up"
            raise FabricError(message, code="cancelled")
        if self.left(tokens_count) <= 0:
            self._refuse(f"has {self.passed_tokens + tokens_count} tokens or more")

    def _refuse(self, what: str) -> NoReturn:
        message = (
            f"the prompt {what} and the context holds {self.tokens_max} tokens: "
            "shorten the conversation"
        )
        raise RejectedError(message, code="context_length_exceeded", param="messages")
