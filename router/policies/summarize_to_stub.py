"""Policy that replaces old messages by a short note with their number and size."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole, ToolUse
from router.policies.exchanges import Exchange, exchanges_of, last_of, user_turns
from router.policies.policy import EditPolicy, PolicyTurn, in_strides, require_within

_OPENS: Final = "[Dropped here: "
_ARGUMENT_CHARS: Final = 200  # of the remaining call; longer arguments are dropped
_NOUNS: Final = (
    (MessageRole.USER, "user messages"),
    (MessageRole.ASSISTANT, "answers"),
    (MessageRole.TOOL, "tool results"),
)


@dataclass(frozen=True, slots=True)
class SummarizeToStub(EditPolicy):
    """Dropping of old turns, and of old tool turns within a long current turn."""

    turns: int = 4  # turns before the current one that are kept
    steps: int = 16  # tool turns of the current one that are kept
    every: int = 4  # stride of either cut

    def __post_init__(self) -> None:
        """Raise RejectedError for invalid options."""
        for name in ("turns", "steps", "every"):
            require_within(name, getattr(self, name), 1, MESSAGES_MAX)

    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        return self._without_turns(self._without_steps(messages))

    def _without_turns(self, messages: Sequence[Message]) -> Sequence[Message]:
        starts = user_turns(messages)
        cut = in_strides(len(starts) - 1 - self.turns, self.every)
        if not cut:
            return messages
        kept, dropped = _split_system(messages[: starts[cut]])
        first = messages[starts[cut]]  # never the last user message, as the current turn is kept
        headed = replace(first, texts=(f"{_stub(dropped)}\n\n", *first.texts))
        return [*kept, headed, *messages[starts[cut] + 1 :]]

    def _without_steps(self, messages: Sequence[Message]) -> Sequence[Message]:
        present = last_of(messages, MessageRole.USER)
        steps: dict[int, Exchange] = {}  # the first answered call of each
        for each in exchanges_of(messages):
            is_step = each.asked_at > present and each.answered_at is not None
            if is_step and not _is_stub(messages[each.answered_at or 0]):
                steps.setdefault(each.asked_at, each)
        places = list(steps)
        cut = in_strides(len(steps) - self.steps, self.every)
        if not cut:
            return messages
        start, end = places[0], places[cut]
        kept, dropped = _split_system(messages[start:end])
        return [
            *messages[:start],
            *kept,
            *_stub_exchange(steps[start], messages, dropped),
            *messages[end:],
        ]


def _split_system(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system messages and the others."""
    kept = [each for each in messages if each.role is MessageRole.SYSTEM]
    return kept, [each for each in messages if each.role is not MessageRole.SYSTEM]


def _stub_exchange(
    step: Exchange, messages: Sequence[Message], dropped: Sequence[Message]
) -> tuple[Message, Message]:
    """Return one call with one result in place of many: models imitate what they see."""
    assert step.answered_at is not None, "only answered calls are steps"
    use = step.use(messages)
    if len(_spell_use(use)) > _ARGUMENT_CHARS:
        use = replace(use, arguments={})
    call = Message(MessageRole.ASSISTANT, (), uses=(use,), reasoning=None)
    return call, replace(messages[step.answered_at], texts=(_stub(dropped),), is_error=False)


def _stub(dropped: Sequence[Message]) -> str:
    counts = [(sum(m.role is role for m in dropped), noun) for role, noun in _NOUNS]
    parts = ", ".join(f"{count} {noun}" for count, noun in counts if count)
    chars = sum(map(_chars_of, dropped))
    return f"{_OPENS}{len(dropped)} earlier messages ({parts}), {chars:,} characters]"


def _is_stub(result: Message) -> bool:
    return "".join(result.texts).startswith(_OPENS)


def _chars_of(message: Message) -> int:
    text_chars = sum(map(len, message.texts)) + len(message.reasoning or "")
    return text_chars + sum(len(_spell_use(use)) for use in message.uses)


def _spell_use(use: ToolUse) -> str:
    arguments = use.arguments
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
