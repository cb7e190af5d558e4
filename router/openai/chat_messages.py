"""Chat messages as OpenAI's clients send them."""

from dataclasses import dataclass
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.json_items import ItemCount
from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole, ToolUse
from router.api.other_content import NO_CONTENT, OTHER_PART, Content, content_kind
from router.http.schema import (
    AnyObject,
    AnyValue,
    ArrayOf,
    Either,
    Flag,
    ObjectOf,
    Tagged,
    Text,
    Unsupported,
    WordIn,
    only,
    optional,
    required,
)
from router.limits import MESSAGE_NAME_CHARS_MAX, TOOLS_MAX
from router.openai.custom_tools import CUSTOM_INPUT

_NAME: Final = Text(MESSAGE_NAME_CHARS_MAX)
# Templates have no developer role: OpenAI renamed the system role for its own models only.
_ROLES: Final = {
    "system": MessageRole.SYSTEM,
    "developer": MessageRole.SYSTEM,
    "user": MessageRole.USER,
    "assistant": MessageRole.ASSISTANT,
    "tool": MessageRole.TOOL,
}


_TEXT: Final = only("text", Text())
_PART: Final = Tagged(
    {
        **dict.fromkeys(("text", "input_text", "output_text"), _TEXT),
        "refusal": only("refusal", Text()),
    },
    other=OTHER_PART,
)
_CONTENT: Final = content_kind(Either({str: Text(), dict: _PART}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionUse:
    name: str = required(Text())
    arguments: Any = optional(Either({dict: AnyObject(), str: Text()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionCall:
    function: _FunctionUse = required(ObjectOf(_FunctionUse))
    id: str | None = optional(_NAME)

    def use(self, argument_items: ItemCount) -> ToolUse:
        arguments = _arguments(self.function.arguments, argument_items)
        return ToolUse(self.function.name, arguments, self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CustomUse:
    name: str = required(Text())
    input: str = required(Text())


@dataclass(frozen=True, slots=True, kw_only=True)
class _CustomCall:
    custom: _CustomUse = required(ObjectOf(_CustomUse))
    id: str | None = optional(_NAME)

    def use(self, _argument_items: ItemCount) -> ToolUse:
        return ToolUse(self.custom.name, {CUSTOM_INPUT: self.custom.input}, self.id)


_CALL: Final = Tagged(
    {"function": ObjectOf(_FunctionCall), "custom": ObjectOf(_CustomCall)},
    "functions and custom tools are called",
    default="function",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """Fields of a message in any role."""

    role: MessageRole = required(WordIn(_ROLES))
    function_call: Any = optional(Unsupported("use tool_calls"))
    content: Content = required(_CONTENT)
    name: str | None = optional(_NAME)
    prefix: bool = optional(Flag(), False)  # of the last one: the model continues it

    def message(self, _argument_items: ItemCount) -> Message:
        """Return the message of a turn; `_argument_items` bounds the arguments of all calls."""
        return Message(self.role, self.content.texts, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolResult(ChatMessage):
    tool_call_id: str | None = optional(_NAME)

    def message(self, _argument_items: ItemCount) -> Message:
        texts = self.content.texts
        return Message(self.role, texts, name=self.name, result_of=self.tool_call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer(ChatMessage):
    content: Content = optional(_CONTENT, NO_CONTENT)  # absent where it only called tools
    tool_calls: list[_FunctionCall | _CustomCall] | None = optional(ArrayOf(_CALL, TOOLS_MAX))
    # The reasoning, by any of the names that servers of local models use.
    reasoning_content: str | None = optional(Text())
    reasoning: Any = optional(AnyValue())
    thinking: Any = optional(AnyValue())

    def message(self, argument_items: ItemCount) -> Message:
        thoughts = (self.reasoning_content, self.reasoning, self.thinking)
        return Message(
            self.role,
            self.content.texts,
            name=self.name,
            uses=tuple(call.use(argument_items) for call in self.tool_calls or ()),
            reasoning=next((thought for thought in thoughts if isinstance(thought, str)), None),
        )


_MESSAGE: Final = ObjectOf(ChatMessage)
_RECORDS: Final = dict.fromkeys(_ROLES, _MESSAGE) | {
    "assistant": ObjectOf(_Answer),
    "tool": ObjectOf(_ToolResult),
}
_EXPECTED: Final = f"expected one of {', '.join(_ROLES)}"
MESSAGES: Final = ArrayOf(
    Tagged(_RECORDS, _EXPECTED, "unsupported_value", tag="role"), MESSAGES_MAX, count_min=1
)


def _arguments(arguments: Any, argument_items: ItemCount) -> dict[str, Any] | str:
    """Return arguments as the object that templates iterate over, if they are one."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}  # what clients send for functions without parameters
    argument_items.feed_whole(arguments)
    try:
        parsed = parse_json(arguments)
    except RejectedError:
        return str(arguments)  # the model's own broken JSON must not stop the conversation
    return parsed if isinstance(parsed, dict) else str(arguments)
