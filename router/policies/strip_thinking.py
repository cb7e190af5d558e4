"""Drops what the model thought in earlier turns; what it said stays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole
from router.policies.exchanges import user_turns
from router.policies.policy import EditPolicy, PolicyTurn, require_within


@dataclass(frozen=True, slots=True)
class StripThinking(EditPolicy):
    """A turn is all from one message of the user to the next; the present one keeps its thoughts.

    A thought that the client left out is not put back either.
    """

    keep: int = 0  # earlier turns that keep theirs

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        require_within("keep", self.keep, 0, MESSAGES_MAX)

    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        turns = user_turns(messages)
        end = turns[-1 - self.keep] if len(turns) > self.keep else 0
        return without_thoughts(messages, end)


def without_thoughts(messages: Sequence[Message], end: int) -> list[Message]:
    """Return messages, those in front of `end` without their thoughts."""
    end = min(end, len(messages) - 1)
    return [
        replace(message, reasoning=None, is_stripped=True)
        if at < end and message.role is MessageRole.ASSISTANT
        else message
        for at, message in enumerate(messages)
    ]
