"""Interface of edit policies, which rewrite a conversation before a node reads it.

Clients keep sending the whole conversation, so a policy sees the same messages again in the next
turn and must edit them in the same way: its result may depend on the messages and its options only.
Otherwise prompts would no longer share a prefix with the agent's cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from fabric.errors import RejectedError
from fabric.turn.messages import Message
from router.prompt import Prompt


def in_strides(excess: int, stride: int) -> int:
    """Return the excess rounded down to a multiple of the stride.

    Cutting a little more each turn would invalidate the cache each turn. With a stride of 8, seven
    turns of eight keep their prefix.
    """
    return max(0, excess) // stride * stride


def require_within(name: str, value: int, low: int, high: int | None) -> None:
    """Raise RejectedError for an option out of its bounds."""
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        message = f"{name} must be {bounds}"
        raise RejectedError(message, code="invalid_policy", param=name)


@dataclass(frozen=True, slots=True)
class EditOutcome:
    """Name and size of an edit."""

    name: str
    count: int = 0  # of changed or dropped messages; a dialect's own edit may count calls or turns
    cleared_tokens: int = 0  # if the dialect reports them
    failure: str = ""  # why it was discarded, without text of the conversation

    def __str__(self) -> str:
        """Return the outcome as a header's value."""
        return f"{self.name}={f'failed ({self.failure})' if self.failure else self.count}"


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """Facts of a turn for policies, besides its messages."""

    number: int  # answers so far
    model: str


class EditPolicy(ABC):
    """Base of policies.

    The system prompt, the user's last message and the last message of all must stay unchanged, and
    a call must keep its result; an edit that violates this is discarded.
    """

    @abstractmethod
    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        """Return the messages for the model: the same, changed, or fewer."""


T = TypeVar("T")

# Bounds of what a chat template adds to a prompt: markup around messages, and indented tools.
_TEMPLATE_BYTES: Final = 4_096
_TEMPLATE_FACTOR: Final = 2


class PromptServices(Protocol):
    """Services that counted edits use."""

    @property
    def context_tokens_max(self) -> int | None:
        """The model's shortest context on any node; None if unknown."""

    async def count(self, prompt: Prompt) -> int:
        """Return a prompt's tokens by the model's tokenizer."""

    async def run(self, prompt: Prompt, work: Callable[[], T]) -> T:
        """Run work on a prompt, in a thread if it is long."""


class CountedEdit(ABC):
    """Base of edits that need token counts."""

    name: str

    @abstractmethod
    async def apply(self, prompt: Prompt, services: PromptServices) -> tuple[Prompt, EditOutcome]:
        """Return the edited prompt and the outcome."""


def can_reach_tokens(prompt: Prompt, tokens: int) -> bool:
    """Return whether a prompt's bytes allow this number of tokens, each of at least one byte."""
    return prompt.bytes_count * _TEMPLATE_FACTOR + _TEMPLATE_BYTES >= tokens
