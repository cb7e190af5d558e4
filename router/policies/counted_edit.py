"""Edits of single dialects that depend on the number of tokens of a prompt."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from router.policies.policy import EditOutcome
from router.prompt import Prompt

T = TypeVar("T")

# Bounds of what a chat template adds to a prompt: markup around messages, and indented tools.
_TEMPLATE_BYTES: Final = 4_096
_TEMPLATE_FACTOR: Final = 2


class PromptDesk(Protocol):
    """Services that counted edits use."""

    @property
    def context_tokens_max(self) -> int | None:
        """The model's shortest context on any node; None if unknown."""

    async def count(self, prompt: Prompt) -> int:
        """Return a prompt's tokens by the model's tokenizer."""

    async def run(self, prompt: Prompt, work: Callable[[], T]) -> T:
        """Run work on a prompt, in a thread if it is long."""


class CountedEdit(ABC):
    """Base of these edits."""

    name: str

    @abstractmethod
    async def apply(self, prompt: Prompt, desk: PromptDesk) -> tuple[Prompt, EditOutcome]:
        """Return the edited prompt and the outcome."""


def may_have(prompt: Prompt, tokens: int) -> bool:
    """Return whether a prompt may have so many tokens, as each has at least one byte."""
    return prompt.bytes_count * _TEMPLATE_FACTOR + _TEMPLATE_BYTES >= tokens
