"""Policy that drops the reasoning of earlier turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole
from router.policies.exchanges import user_turns
from router.policies.policy import EditPolicy, PolicyTurn, require_within


@dataclass(frozen=True, slots=True)
class StripThinking(EditPolicy):
    """Dropping of reasoning; the current turn, from the user's last message on, keeps it.

    Reasoning that the client left out is not restored either.
    """

    keep: int = 0  # number of earlier turns that keep theirs

    def __post_init__(self) -> None:
        """Raise RejectedError for invalid options."""
        require_within("keep", self.keep, 0, MESSAGES_MAX)

    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        turns = user_turns(messages)
        end = turns[-1 - self.keep] if len(turns) > self.keep else 0
        return without_thoughts(messages, end)


def without_thoughts(messages: Sequence[Message], end: int) -> list[Message]:
    """Return messages without the reasoning of those before `end`."""
    end = min(end, len(messages) - 1)
    return [
        replace(message, reasoning=None, is_stripped=True)
        if at < end and message.role is MessageRole.ASSISTANT
        else message
        for at, message in enumerate(messages)
    ]
