"""What a policy is: a rewriting of what a conversation says, before a node reads it.

The client goes on sending all of it, so a policy sees the same messages again in the next turn, and
must do the same with them: what it returns is made of the messages and its own options alone. Else
no turn would begin as the one before, and the agent's memory would be of no use.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.turn.messages import Message


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
