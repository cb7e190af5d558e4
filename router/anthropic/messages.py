"""Anthropic's `system` and `messages` as a conversation; neighbours of one role are joined."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole
from router.anthropic.content import (
    ANSWER_BLOCKS,
    TEXT_BLOCKS,
    USER_BLOCKS,
    Notes,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
    unbilled,
)
from router.api.conversation import JoinedMessages, without_empty
from router.http.refusals import refuse
from router.http.schema import ArrayOf, ObjectOf, Tagged, required

_ROLES: Final = (MessageRole.USER, MessageRole.ASSISTANT, MessageRole.SYSTEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SystemMessage:
    """System message, which clients also send in mid-conversation."""

    content: list[TextBlock] = required(TEXT_BLOCKS)

    def messages(self, notes: Notes) -> list[Message]:
        return [system_message(self.content, notes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _UserMessage:
    content: list[Any] = required(USER_BLOCKS)

    def messages(self, notes: Notes) -> list[Message]:
        """Return the message; results of tools become messages of their own, as in templates."""
        messages: list[Message] = []
        texts: list[str] = []

        def end_text() -> None:
            if texts:
                messages.append(Message(MessageRole.USER, (joined(texts),)))
                texts.clear()

        for block in self.content:
            notes.retain(block.cache_s)
            if isinstance(block, ToolResultBlock):
                end_text()
                messages.append(_result(block, notes))
            else:
                texts.append(block.text)
        if not self.content:
            texts.append("")
        end_text()
        return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    content: list[Any] = required(ANSWER_BLOCKS)

    def messages(self, notes: Notes) -> list[Message]:
        for block in self.content:
            if isinstance(block, TextBlock | ToolUseBlock):
                notes.retain(block.cache_s)
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        uses = [block.use() for block in self.content if isinstance(block, ToolUseBlock)]
        return [
            Message(
                MessageRole.ASSISTANT,
                # As generated: there was nothing between the texts of its blocks.
                tuple(text for text in texts if text),
                uses=tuple(uses),
                reasoning="".join(thoughts) or None,
            )
        ]


AnyMessage = _SystemMessage | _UserMessage | _Answer


_EXPECTED: Final = f"expected one of {', '.join(_ROLES)}"
MESSAGES: Final = ArrayOf(
    Tagged(
        {
            "user": ObjectOf(_UserMessage),
            "assistant": ObjectOf(_Answer),
            "system": ObjectOf(_SystemMessage),
        },
        _EXPECTED,
        "unsupported_value",
        tag="role",
    ),
    MESSAGES_MAX,
    count_min=1,
)


def conversation(
    system: list[TextBlock] | None, messages: Sequence[AnyMessage], notes: Notes
) -> list[Message]:
    """Return `system` and `messages` as a conversation; raise RejectedError for an empty one."""
    conversation = JoinedMessages(between="\n")
    if system is not None:
        conversation.add(system_message(system, notes))
    for body in messages:
        for message in body.messages(notes):
            conversation.add(message)
    if not conversation.messages:
        refuse("messages", "they hold no text")
    return without_empty(conversation.messages, "messages")


def system_message(blocks: list[TextBlock], notes: Notes) -> Message:
    """Return a system prompt of blocks of text."""
    for block in blocks:
        notes.retain(block.cache_s)
    return Message(MessageRole.SYSTEM, (joined([unbilled(block.text, notes) for block in blocks]),))


def _result(block: ToolResultBlock, notes: Notes) -> Message:
    for inner in block.content or ():
        notes.retain(inner.cache_s)
    text = joined([inner.text for inner in block.content or ()])
    return Message(MessageRole.TOOL, (text,), result_of=block.tool_use_id, is_error=block.is_error)
