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
    drop_billing_line,
    joined,
    read_text,
)
from router.api.conversation import JoinedMessages, without_empty
from router.api.other_content import OtherContent, ignored_types, spaced_texts
from router.http.refusals import refuse
from router.http.schema import ArrayOf, ObjectOf, Tagged, required

_ROLES: Final = (MessageRole.USER, MessageRole.ASSISTANT, MessageRole.SYSTEM)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SystemMessage:
    """System message, which clients also send in mid-conversation."""

    content: list[TextBlock | OtherContent] = required(TEXT_BLOCKS)

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
            if isinstance(block, ToolResultBlock):
                end_text()
                notes.retain(block.cache_s)
                messages.append(_result(block, notes))
            else:
                texts.append(read_text(block, notes))
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
        notes.ignore(*ignored_types(self.content))
        texts = spaced_texts(
            block.text if isinstance(block, TextBlock) else block
            for block in self.content
            if isinstance(block, TextBlock | OtherContent)
        )
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
    system: list[TextBlock | OtherContent] | None, messages: Sequence[AnyMessage], notes: Notes
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


def system_message(blocks: list[TextBlock | OtherContent], notes: Notes) -> Message:
    """Return a system prompt of blocks."""
    texts = [drop_billing_line(read_text(block, notes), notes) for block in blocks]
    return Message(MessageRole.SYSTEM, (joined(texts),))


def _result(block: ToolResultBlock, notes: Notes) -> Message:
    text = joined([read_text(inner, notes) for inner in block.content or ()])
    return Message(MessageRole.TOOL, (text,), result_of=block.tool_use_id, is_error=block.is_error)
