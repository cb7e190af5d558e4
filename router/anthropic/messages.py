"""Anthropic's `system` and `messages` as a conversation; neighbours of one role are one message."""

from typing import Any

from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole
from router.anthropic.content import (
    Notes,
    blocks,
    joined,
    note_cache_control,
    only_texts,
    refuse_block,
    result_id,
    text_of,
    tool_use,
    unbilled,
)
from router.api.begun_answer import without_empty
from router.api.joined_messages import JoinedMessages
from router.http.fields import Fields, refuse, require_object, require_text
from router.limits import BLOCKS_PER_MESSAGE_MAX

_ROLES = {
    role.value: role for role in (MessageRole.USER, MessageRole.ASSISTANT, MessageRole.SYSTEM)
}


def parse_conversation(fields: Fields, notes: Notes) -> list[Message]:
    """Check `system` and `messages`; raise RejectedError naming the first that is wrong."""
    said = JoinedMessages(between="\n")
    system = fields.raw("system")
    if system is not None:
        said.add(_system(system, fields.param("system"), notes))
    fields.require("messages")
    messages = fields.items("messages", MESSAGES_MAX)
    if not messages:
        refuse(fields.param("messages"), "it is empty")
    for index, item in enumerate(messages):
        param = f"{fields.param('messages')}[{index}]"
        for message in _parse(Fields(require_object(item, param), f"{param}."), notes):
            said.add(message)
    if not said.messages:
        refuse(fields.param("messages"), "nobody says anything")
    return without_empty(said.messages, fields.param("messages"))


def _system(content: Any, param: str, notes: Notes) -> Message:
    texts = only_texts(content, param, BLOCKS_PER_MESSAGE_MAX, notes)
    kept = [unbilled(text, notes) for text in texts]
    return Message(MessageRole.SYSTEM, (joined(kept),))


def _parse(fields: Fields, notes: Notes) -> list[Message]:
    role = _ROLES.get(require_text(fields.require("role"), fields.param("role")))
    if role is None:
        refuse(fields.param("role"), f"expected one of {', '.join(_ROLES)}", "unsupported_value")
    content, param = fields.require("content"), fields.param("content")
    if role is MessageRole.SYSTEM:  # clients of today send some in mid-conversation
        return [_system(content, param, notes)]
    found = blocks(content, param, BLOCKS_PER_MESSAGE_MAX)
    return _said(found, notes) if role is MessageRole.USER else [_answered(found, notes)]


def _said(found: list[tuple[str, Fields]], notes: Notes) -> list[Message]:
    """Read a user's message; results of tools are messages of their own to a template."""
    messages: list[Message] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            messages.append(Message(MessageRole.USER, (joined(texts),)))
            texts.clear()

    for kind, fields in found:
        if kind == "text":
            texts.append(text_of(fields, notes))
        elif kind == "tool_result":
            end_text()
            messages.append(_result(fields, notes))
        else:
            refuse_block(kind, fields)
    if not found:
        texts.append("")
    end_text()
    return messages


def _result(fields: Fields, notes: Notes) -> Message:
    note_cache_control(fields, notes)
    is_error = fields.flag("is_error")
    content = fields.raw("content")
    texts = []
    if content is not None:
        texts = only_texts(content, fields.param("content"), BLOCKS_PER_MESSAGE_MAX, notes)
    called = result_id(fields)
    return Message(MessageRole.TOOL, (joined(texts),), result_of=called, is_error=is_error)


def _answered(found: list[tuple[str, Fields]], notes: Notes) -> Message:
    texts, thoughts, uses = [], [], []
    for kind, fields in found:
        if kind == "text":
            texts.append(text_of(fields, notes))
        elif kind == "thinking":
            thoughts.append(require_text(fields.require("thinking"), fields.param("thinking")))
            fields.text("signature")
        elif kind == "redacted_thinking":
            fields.text("data")  # sealed elsewhere: no model here can read it
        elif kind == "tool_use":
            uses.append(tool_use(fields, notes))
        else:
            refuse_block(kind, fields)
    reasoning = "".join(thoughts) or None
    return Message(
        MessageRole.ASSISTANT,
        # As it was answered: its blocks' text had nothing in between.
        tuple(text for text in texts if text),
        uses=tuple(uses),
        reasoning=reasoning,
    )
