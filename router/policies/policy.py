"""What a policy is: a rewriting of what a conversation says, before a node reads it.

The client goes on sending all of it, so a policy sees the same messages again in the next turn, and
must do the same with them: what it returns is made of the messages and its own options alone. Else
no turn would begin as the one before, and the agent's memory would be of no use.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.errors import RejectedError
from fabric.turn.messages import Message


def in_strides(excess: int, stride: int) -> int:
    """Return how many of so many are to go now: all, down to a multiple of the stride."""
    return max(0, excess) // stride * stride


def require_within(name: str, value: int, low: int, high: int | None) -> None:
    """Raise RejectedError for a number out of its bounds."""
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        message = f"{name} must be {bounds}"
        raise RejectedError(message, code="invalid_policy", param=name)


@dataclass(frozen=True, slots=True)
class EditOutcome:
    """Which edit, and how much."""

    name: str
    count: int = 0  # messages changed or dropped; of a dialect's own edit, what it counts
    cleared_tokens: int = 0  # by the model's tokenizer, where the dialect tells them
    failure: str = ""  # why it was left out: words without any of the conversation's

    def __str__(self) -> str:
        """Spell it for a header."""
        return f"{self.name}={f'failed ({self.failure})' if self.failure else self.count}"


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """Facts of a turn that a policy gets beside its messages."""

    number: int  # answers so far
    model: str


class EditPolicy(ABC):
    """Rewrites conversations.

    The system prompt, the last message of the user and the last message of all must stay as they
    are, and no call may be parted from its result; what breaks that is not used.
    """

    @abstractmethod
    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        """Return what the model is to read: messages as they came, others in their place, fewer."""
