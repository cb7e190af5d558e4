"""Policy that drops failed calls and their results once a later call of the tool succeeded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fabric.turn.messages import Message, MessageRole
from router.policies.error_texts import is_failed
from router.policies.exchanges import Exchange, exchanges_of
from router.policies.policy import EditPolicy, PolicyTurn


@dataclass(frozen=True, slots=True)
class DropFailedToolCalls(EditPolicy):
    """Dropping of failed calls; an answer keeps its text and loses its reasoning about them."""

    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        dropped = _made_good(messages)
        if not dropped:
            return messages
        gone = {each.answered_at for each in dropped}
        calls = {(each.asked_at, each.use_at) for each in dropped}
        kept: list[Message] = []
        is_said_before = False  # the last one kept is the text of an answer without its calls
        for at, message in enumerate(messages):
            if at in gone:
                continue
            left = tuple(use for i, use in enumerate(message.uses) if (at, i) not in calls)
            # Never the last message: that is a result, which stays.
            if is_said_before and message.role is MessageRole.ASSISTANT:
                message = replace(message, texts=kept.pop().texts + message.texts)  # noqa: PLW2901
            is_said_before = False
            if len(left) == len(message.uses):
                kept.append(message)
            elif left:
                kept.append(replace(message, uses=left))
            elif any(message.texts):
                kept.append(replace(message, uses=(), reasoning=None))
                is_said_before = True
        return kept


def _made_good(messages: Sequence[Message]) -> list[Exchange]:
    """List failed calls whose tool succeeded in a later answer; not one with the last result.

    Calls of one answer are made at once: none of them is later than another.
    """
    found: list[Exchange] = []
    good: set[str] = set()
    last = len(messages) - 1
    by_answer = groupby(reversed(exchanges_of(messages)), key=lambda each: each.asked_at)
    for _, calls in by_answer:
        good_here: set[str] = set()
        for each in calls:
            if each.answered_at is None:
                continue
            name, failed = each.use(messages).name, is_failed(messages[each.answered_at])
            if failed and name in good and each.answered_at < last:
                found.append(each)
            elif not failed:
                good_here.add(name)
        good |= good_here
    return found
