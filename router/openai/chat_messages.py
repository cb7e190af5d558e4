"""Chat messages as OpenAI spells them."""

from typing import Any

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.json_items import ItemCount
from fabric.limits import JSON_ITEMS_MAX, MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole, ToolUse
from router.http.fields import Fields, refuse, require_object, require_text, unsupported
from router.limits import MESSAGE_NAME_CHARS_MAX, TOOLS_MAX
from router.openai.custom_tools import CUSTOM_INPUT

# Templates know no developer: OpenAI renamed the system role for its own models only.
_ROLES = {
    "system": MessageRole.SYSTEM,
    "developer": MessageRole.SYSTEM,
    "user": MessageRole.USER,
    "assistant": MessageRole.ASSISTANT,
    "tool": MessageRole.TOOL,
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "refusal": "refusal"}


def parse_messages(fields: Fields) -> list[Message]:
    """Check and normalise the `messages` array."""
    fields.require("messages")
    messages = fields.items("messages", MESSAGES_MAX)
    if not messages:
        refuse(fields.param("messages"), "it is empty")
    inner = ItemCount(JSON_ITEMS_MAX)  # of arguments, which are JSON in strings
    return [
        _message(require_object(item, param), param, inner)
        for index, item in enumerate(messages)
        for param in [f"{fields.param('messages')}[{index}]"]
    ]


def _message(raw: dict[str, Any], param: str, inner: ItemCount) -> Message:
    fields = Fields(raw, f"{param}.")
    role = _ROLES.get(require_text(fields.require("role"), fields.param("role")))
    if role is None:
        known = ", ".join(_ROLES)
        refuse(fields.param("role"), f"expected one of {known}", "unsupported_value")
    if fields.raw("function_call") is not None:
        unsupported(fields.param("function_call"), "use tool_calls")
    is_answer, is_result = role is MessageRole.ASSISTANT, role is MessageRole.TOOL
    return Message(
        role=role,
        uses=_tool_calls(fields, inner) if is_answer else (),
        texts=_content(fields, role),
        name=fields.text("name", MESSAGE_NAME_CHARS_MAX),
        reasoning=_reasoning(fields) if is_answer else None,
        result_of=fields.text("tool_call_id", MESSAGE_NAME_CHARS_MAX) if is_result else None,
    )


def _reasoning(fields: Fields) -> str | None:
    """Read a thought by any of the names that servers of local models give it."""
    named = fields.text("reasoning_content"), fields.raw("reasoning"), fields.raw("thinking")
    return next((thought for thought in named if isinstance(thought, str)), None)


def _content(fields: Fields, role: MessageRole) -> tuple[str, ...]:
    content = fields.raw("content")
    param = fields.param("content")
    if isinstance(content, str):
        return (content,)
    if content is None:
        if role is MessageRole.ASSISTANT:
            return ()  # it only called tools
        fields.require("content")
    if not isinstance(content, list):
        refuse(param, "expected a string or an array of parts", "invalid_type")
    return tuple(_part(item, f"{param}[{index}]") for index, item in enumerate(content))


def _part(item: object, param: str) -> str:
    if isinstance(item, str):
        return item
    fields = Fields(require_object(item, param), f"{param}.")
    kind = require_text(fields.require("type"), fields.param("type"))
    if kind not in _TEXT_PARTS:
        message = f"Unsupported '{param}': this server takes text only, not {kind[:64]!r}."
        raise RejectedError(message, code="unsupported_content", param=param)
    name = _TEXT_PARTS[kind]
    return require_text(fields.require(name), fields.param(name))


def _tool_calls(fields: Fields, inner: ItemCount) -> tuple[ToolUse, ...]:
    uses = []
    for index, item in enumerate(fields.items("tool_calls", TOOLS_MAX) or []):
        param = f"{fields.param('tool_calls')}[{index}]"
        call = Fields(require_object(item, param), f"{param}.")
        kind = call.raw("type") or "function"
        if kind not in ("function", "custom"):
            unsupported(call.param("type"), "functions and custom tools are called")
        called = Fields(require_object(call.require(kind), call.param(kind)), f"{param}.{kind}.")
        name = require_text(called.require("name"), called.param("name"))
        call_id = call.text("id", MESSAGE_NAME_CHARS_MAX)
        uses.append(ToolUse(name, _said(kind, called, inner), call_id))
    return tuple(uses)


def _said(kind: str, fields: Fields, inner: ItemCount) -> dict[str, Any] | str:
    if kind == "function":
        return _arguments(fields, inner)
    return {CUSTOM_INPUT: require_text(fields.require("input"), fields.param("input"))}


def _arguments(fields: Fields, inner: ItemCount) -> dict[str, Any] | str:
    """Return arguments as the object that templates iterate over, where they are one."""
    raw = fields.raw("arguments")
    if raw is None:
        return {}
    if isinstance(raw, dict):
        return raw
    text = require_text(raw, fields.param("arguments"))
    if not text.strip():
        return {}  # what clients send for functions without parameters
    inner.feed_whole(text)
    try:
        parsed = parse_json(text)
    except RejectedError:
        return text  # the model's own broken JSON must not stop the conversation
    return parsed if isinstance(parsed, dict) else text
