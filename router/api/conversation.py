"""Conversations as templates take them: joined roles, no billing lines, perhaps a begun answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fabric.turn.answer_constraints import CallChoice
from fabric.turn.generation import Sampling
from fabric.turn.messages import Message, MessageRole
from router.http.refusals import refuse

# The first line of some clients' system prompts, for their vendor's billing. It means nothing to a
# model, and changes the beginning of every conversation. Proxies hand it on in other dialects.
BILLING_HEADER: Final = "x-anthropic-billing-header"


def without_billing_line(text: str) -> str:
    """Return a system prompt's text without a billing line."""
    return text.partition("\n")[2] if text.startswith(f"{BILLING_HEADER}:") else text


def without_billing_lines(messages: Sequence[Message]) -> list[Message]:
    """Return messages without billing lines, and without system messages that were only that."""
    kept = []
    for message in messages:
        texts = tuple(without_billing_line(text) for text in message.texts)
        if message.role is not MessageRole.SYSTEM or texts == message.texts:
            kept.append(message)
        elif any(texts):
            kept.append(replace(message, texts=tuple(text for text in texts if text)))
    return kept


def ignored_lines(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the name of the billing line if the messages have one, for the answer's header."""
    return (BILLING_HEADER,) if without_billing_lines(messages) != list(messages) else ()


@dataclass(slots=True)
class JoinedMessages:
    """Conversation whose neighbours of one role are joined, with `between` as separator."""

    between: str
    messages: list[Message] = field(default_factory=list)

    def add(self, message: Message) -> None:
        """Append a message, or join it to a previous one of the same role."""
        last = self.messages[-1] if self.messages else None
        if message.role is MessageRole.SYSTEM and not any(message.texts):
            return  # an empty message
        if last is None or last.role is not message.role or message.role is MessageRole.TOOL:
            self.messages.append(message)
            return
        texts = [text for text in (*last.texts, *message.texts) if text]
        if message.role is not MessageRole.ASSISTANT:  # whose parts are one text
            texts = [self.between.join(texts)]
        thoughts = [thought for thought in (last.reasoning, message.reasoning) if thought]
        self.messages[-1] = replace(
            last,
            texts=tuple(texts),
            uses=last.uses + message.uses,
            reasoning="".join(thoughts) or None,
        )


def is_begun(messages: Sequence[Message], param: str) -> bool:
    """Return whether the last message is an answer to continue; refuse one that has calls."""
    last = messages[-1]
    if last.role is not MessageRole.ASSISTANT:
        return False
    if last.uses:
        refuse(param, "its last message calls tools: send their results next")
    return bool("".join(last.texts) or last.reasoning)


def without_empty(messages: Sequence[Message], param: str) -> list[Message]:
    """Return the messages without an empty last answer: the model begins it."""
    last = messages[-1]
    is_empty = not ("".join(last.texts) or last.reasoning or last.uses)
    if last.role is not MessageRole.ASSISTANT or not is_empty:
        return list(messages)
    if len(messages) == 1:
        refuse(param, "it must contain a message with text")
    return list(messages[:-1])


def refuse_format(sampling: Sampling, param: str, calls: CallChoice) -> None:
    """Refuse an output format or a forced tool call for an answer that is continued."""
    if calls.must_call:
        refuse("tool_choice", "a continued answer cannot be forced to call a tool; send 'auto'")
    if sampling.output is not None:
        refuse(param, "a continued answer cannot be forced into a format; remove it")
