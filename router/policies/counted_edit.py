"""Edits that a dialect has of its own, which depend on how many tokens a prompt has."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from router.policies.policy import EditOutcome
from router.prompt import Prompt

T = TypeVar("T")

# Of a prompt's spelling: what a template writes around and between messages, and tools in lines.
_TEMPLATE_BYTES: Final = 4_096
_TEMPLATE_FACTOR: Final = 2


class PromptDesk(Protocol):
    """Services that counted edits use."""

    @property
    def context_tokens_max(self) -> int | None:
        """The model's shortest context on any node; None where none has told it."""

    async def count(self, prompt: Prompt) -> int:
        """Return a prompt's tokens, by the model's own tokenizer."""

    async def run(self, prompt: Prompt, work: Callable[[], T]) -> T:
        """Do work on so long a prompt where it keeps nobody waiting."""


class CountedEdit(ABC):
    """One edit of a dialect."""

    name: str

    @abstractmethod
    async def apply(self, prompt: Prompt, desk: PromptDesk) -> tuple[Prompt, EditOutcome]:
        """Return the prompt as the model is to read it, and what was done."""


def may_have(prompt: Prompt, tokens: int) -> bool:
    """Say whether a prompt may have so many tokens: each is a byte at least."""
    return prompt.bytes_count * _TEMPLATE_FACTOR + _TEMPLATE_BYTES >= tokens
