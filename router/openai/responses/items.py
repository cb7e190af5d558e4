"""Input items of the Responses API, each checked; what they say becomes messages."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BinasciiError
from dataclasses import dataclass
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.json_items import ItemCount
from fabric.limits import JSON_ITEMS_MAX, MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole, ToolUse
from router.api.joined_messages import JoinedMessages
from router.http.fields import Fields, refuse, require_object, require_text
from router.limits import MESSAGE_NAME_CHARS_MAX
from router.openai.custom_tools import CUSTOM_INPUT
from router.openai.responses.tools import template_name

_ROLES: Final = {
    "system": MessageRole.SYSTEM,
    "developer": MessageRole.SYSTEM,
    "user": MessageRole.USER,
    "assistant": MessageRole.ASSISTANT,
}
_TEXTS: Final = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
_BETWEEN: Final = "\n\n"
_CARRIED: Final = b"macfabric:"


@dataclass(frozen=True, slots=True)
class Reference:
    """An item that was answered, or sent, before: by its id."""

    id: str
    param: str


Entry = Message | Reference


def parse_input(fields: Fields) -> list[Entry]:
    """Check `input`: a text of the user's, or items."""
    given = fields.require("input")
    if isinstance(given, str):
        return [Message(MessageRole.USER, (given,))]
    items = fields.items("input", MESSAGES_MAX)
    inner = ItemCount(JSON_ITEMS_MAX)  # of arguments, which are JSON in strings
    return [
        parse_item(Fields(require_object(item, f"input[{index}]"), f"input[{index}]."), inner)
        for index, item in enumerate(items or [])
    ]


def parse_item(fields: Fields, inner: ItemCount) -> Entry:
    """Read one item; a message needs no type."""
    kind = fields.text("type") or "message"
    if kind == "message":
        return _message(fields)
    if kind == "reasoning":
        return Message(MessageRole.ASSISTANT, (), reasoning=_thought(fields))
    if kind in ("function_call", "custom_tool_call"):
        return Message(MessageRole.ASSISTANT, (), uses=(_call(kind, fields, inner),))
    if kind in ("function_call_output", "custom_tool_call_output"):
        call_id = _short(fields, "call_id")
        fields.require("output")
        return Message(MessageRole.TOOL, ("".join(_parts(fields, "output")),), result_of=call_id)
    if kind == "item_reference":
        return Reference(_short(fields, "id"), fields.param("id"))
    message = (
        f"Unsupported '{fields.param('type')}': items of {kind[:64]!r} are not taken here; "
        "messages, reasoning, and calls of functions and custom tools with their outputs are."
    )
    raise RejectedError(message, code="unsupported_content", param=fields.param("type"))


def conversation(instructions: str | None, entries: list[Message]) -> list[Message]:
    """Put a conversation together; its neighbours of one role become one message."""
    said = JoinedMessages(_BETWEEN)
    if instructions:
        said.add(Message(MessageRole.SYSTEM, (instructions,)))
    for message in entries:
        said.add(message)
    if not said.messages:
        refuse("input", "it is empty")
    return said.messages


def carried(thought: str) -> str:
    """Put a thought where clients keep what they send back unread."""
    return urlsafe_b64encode(_CARRIED + thought.encode("utf-8", "replace")).decode()


def _message(fields: Fields) -> Message:
    role = _ROLES.get(require_text(fields.require("role"), fields.param("role")))
    if role is None:
        known = ", ".join(_ROLES)
        refuse(fields.param("role"), f"expected one of {known}", "unsupported_value")
    fields.require("content")
    return Message(role, tuple(_parts(fields, "content")))


def _parts(fields: Fields, name: str) -> list[str]:
    content, param = fields.raw(name), fields.param(name)
    if isinstance(content, str):
        return [content]
    if content is not None and not isinstance(content, list):
        refuse(param, "expected a string or an array of parts", "invalid_type")
    texts = []
    for index, item in enumerate(fields.items(name, MESSAGES_MAX) or []):
        part = Fields(require_object(item, f"{param}[{index}]"), f"{param}[{index}].")
        kind = require_text(part.require("type"), part.param("type"))
        if kind not in _TEXTS:
            message = f"Unsupported '{part.param('type')}': only text is read here."
            raise RejectedError(message, code="unsupported_content", param=part.param("type"))
        text = _TEXTS[kind]
        texts.append(require_text(part.require(text), part.param(text)))
    return texts


def _thought(fields: Fields) -> str | None:
    """Read a thought: as it was, or as it was carried, or at least its summary."""
    whole = "".join(_parts(fields, "content"))
    sealed = fields.text("encrypted_content")
    return whole or _uncarried(sealed or "") or "\n".join(_parts(fields, "summary")) or None


def _uncarried(sealed: str) -> str:
    """Return the thought that was carried; empty for what others have sealed."""
    try:
        raw = urlsafe_b64decode(sealed)
    except (BinasciiError, ValueError):
        return ""
    thought = raw.removeprefix(_CARRIED) if raw.startswith(_CARRIED) else b""
    return thought.decode("utf-8", "replace")


def _call(kind: str, fields: Fields, inner: ItemCount) -> ToolUse:
    call_id, name = _short(fields, "call_id"), _short(fields, "name")
    name = template_name(name, fields.text("namespace", MESSAGE_NAME_CHARS_MAX) or None)
    if kind == "custom_tool_call":
        text = require_text(fields.require("input"), fields.param("input"))
        return ToolUse(name, {CUSTOM_INPUT: text}, call_id)
    spelled = require_text(fields.require("arguments"), fields.param("arguments"))
    inner.feed_whole(spelled)
    try:
        arguments: Any = parse_json(spelled) if spelled else {}
    except RejectedError:
        arguments = spelled  # the model's own broken JSON must not stop the conversation
    return ToolUse(name, arguments if isinstance(arguments, dict) else spelled, call_id)


def _short(fields: Fields, name: str) -> str:
    text = require_text(fields.require(name), fields.param(name))
    if len(text) > MESSAGE_NAME_CHARS_MAX:
        refuse(fields.param(name), f"longer than {MESSAGE_NAME_CHARS_MAX} characters")
    return text
