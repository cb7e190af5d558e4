"""Input items of the Responses API, each of which becomes a message."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BinasciiError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.json_items import ItemCount
from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole, ToolUse
from router.api.conversation import JoinedMessages
from router.api.other_content import (
    NO_CONTENT,
    OTHER_PART,
    Content,
    OtherContent,
    content_kind,
)
from router.http.refusals import refuse
from router.http.schema import (
    ArrayOf,
    Either,
    ObjectOf,
    Parsed,
    Schema,
    Tagged,
    Text,
    WordIn,
    only,
    optional,
    param_path,
    required,
)
from router.limits import MESSAGE_NAME_CHARS_MAX
from router.openai.custom_tools import CUSTOM_INPUT
from router.openai.responses.tools import template_name

_ROLES: Final = WordIn(
    {
        "system": MessageRole.SYSTEM,
        "developer": MessageRole.SYSTEM,
        "user": MessageRole.USER,
        "assistant": MessageRole.ASSISTANT,
    },
    code="unsupported_value",
)
_NAME: Final = Text(MESSAGE_NAME_CHARS_MAX)
_BETWEEN: Final = "\n\n"
_CARRIED: Final = b"macfabric:"


@dataclass(frozen=True, slots=True)
class Reference:
    """Reference to an earlier item by its id."""

    id: str
    param: str


Entry = Message | Reference


_TEXT: Final = only("text", Text())
_TEXT_TYPES: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_PART: Final = Tagged(
    {**dict.fromkeys(_TEXT_TYPES, _TEXT), "refusal": only("refusal", Text())}, other=OTHER_PART
)
_CONTENT: Final = content_kind(_PART, MESSAGES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """Any item."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Types of its parts that the model does not see."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageItem(_Item):
    role: MessageRole = required(_ROLES)
    content: Content = required(_CONTENT)

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.content.ignored

    def entry(self, _argument_items: ItemCount) -> Entry:
        return Message(self.role, self.content.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasoning(_Item):
    content: Content = optional(_CONTENT, NO_CONTENT)
    encrypted_content: str = optional(Text(), "")
    summary: Any = optional(Parsed(lambda value, _param: value, _CONTENT.schema()))
    param: str = param_path()

    def entry(self, _argument_items: ItemCount) -> Entry:
        """Return the reasoning: in full, decoded from `encode_thought`, or only its summary."""
        thought = "".join(self.content.texts) or _decode_thought(self.encrypted_content)
        if not thought and self.summary is not None:
            thought = "\n".join(_CONTENT.read(self.summary, f"{self.param}.summary").texts)
        return Message(MessageRole.ASSISTANT, (), reasoning=thought or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call(_Item):
    call_id: str = required(_NAME)
    name: str = required(_NAME)
    namespace: str | None = optional(_NAME)

    def answer(self, arguments: dict[str, Any] | str) -> Message:
        name = template_name(self.name, self.namespace or None)
        return Message(MessageRole.ASSISTANT, (), uses=(ToolUse(name, arguments, self.call_id),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionCall(_Call):
    arguments: str = required(Text())

    def entry(self, argument_items: ItemCount) -> Entry:
        argument_items.feed_whole(self.arguments)
        try:
            arguments: Any = parse_json(self.arguments) if self.arguments else {}
        except RejectedError:
            arguments = None  # the model's own broken JSON must not stop the conversation
        return self.answer(arguments if isinstance(arguments, dict) else self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CustomCall(_Call):
    input: str = required(Text())

    def entry(self, _argument_items: ItemCount) -> Entry:
        return self.answer({CUSTOM_INPUT: self.input})


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallOutput(_Item):
    call_id: str = required(_NAME)
    output: Content = required(_CONTENT)

    @property
    def ignored(self) -> tuple[str, ...]:
        return self.output.ignored

    def entry(self, _argument_items: ItemCount) -> Entry:
        text = "".join(self.output.texts)
        return Message(MessageRole.TOOL, (text,), result_of=self.call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReferenceItem(_Item):
    id: str = required(_NAME)
    param: str = param_path()

    def entry(self, _argument_items: ItemCount) -> Entry:
        return Reference(self.id, f"{self.param}.id")


@dataclass(frozen=True, slots=True)
class _OtherItem:
    """Item of an unlisted type in an answer, such as the call of a hosted tool."""

    content: OtherContent
    is_call: bool

    @property
    def ignored(self) -> tuple[str, ...]:
        return (self.content.ignored,) if self.content.ignored else ()

    def entry_after(self, before: Sequence[Entry]) -> Message:
        """Return its message; a call is on lines of its own, as answers are joined without any."""
        if not self.is_call:
            return Message(MessageRole.USER, (self.content.text,))
        start = "\n" if _ends_within_line(before) else ""
        return Message(MessageRole.ASSISTANT, (f"{start}{self.content.text}\n",))


@dataclass(frozen=True, slots=True)
class _OtherItemKind:
    def read(self, value: Any, param: str) -> _OtherItem:
        content = OTHER_PART.read(value, param)
        return _OtherItem(content, value["type"].endswith("_call"))

    def schema(self) -> Schema:
        return OTHER_PART.schema()


InputItem = (
    _MessageItem
    | _Reasoning
    | _FunctionCall
    | _CustomCall
    | _CallOutput
    | _ReferenceItem
    | _OtherItem
)


_OUTPUT: Final = ObjectOf(_CallOutput)
_ITEM: Final = Tagged(
    {
        "message": ObjectOf(_MessageItem),
        "reasoning": ObjectOf(_Reasoning),
        "function_call": ObjectOf(_FunctionCall),
        "custom_tool_call": ObjectOf(_CustomCall),
        "function_call_output": _OUTPUT,
        "custom_tool_call_output": _OUTPUT,
        "item_reference": ObjectOf(_ReferenceItem),
    },
    default="message",
    other=_OtherItemKind(),
)
INPUT: Final = Either({str: Text(), list: ArrayOf(_ITEM, MESSAGES_MAX)})


def entries_of(given: str | Sequence[InputItem], argument_items: ItemCount) -> tuple[Entry, ...]:
    """Return the entries of an input: one text of the user, or items."""
    if isinstance(given, str):
        return (Message(MessageRole.USER, (given,)),)
    entries: list[Entry] = []
    for item in given:
        if isinstance(item, _OtherItem):
            entries.append(item.entry_after(entries))
        else:
            entries.append(item.entry(argument_items))
    return tuple(entries)


def _ends_within_line(entries: Sequence[Entry]) -> bool:
    """Return whether the entries end with text of an answer that does not end its line."""
    for entry in reversed(entries):
        if not isinstance(entry, Message) or entry.role is not MessageRole.ASSISTANT:
            return False
        text = "".join(entry.texts)
        if text:
            return not text.endswith("\n")
    return False


def answered_message(item: dict[str, Any], argument_items: ItemCount) -> Message:
    """Return an item of an answer as the message it becomes when a client sends it back."""
    message = _ITEM.read(item, "output").entry(argument_items)
    assert isinstance(message, Message), "answers hold no references"
    return message


def conversation(instructions: str | None, entries: Sequence[Message]) -> list[Message]:
    """Return a conversation in which neighbouring messages of one role are one message."""
    joined = JoinedMessages(_BETWEEN)
    if instructions:
        joined.add(Message(MessageRole.SYSTEM, (instructions,)))
    for message in entries:
        joined.add(message)
    if not joined.messages:
        refuse("input", "it is empty")
    return joined.messages


def encode_thought(thought: str) -> str:
    """Encode a thought for a field that clients send back unread."""
    return urlsafe_b64encode(_CARRIED + thought.encode("utf-8", "replace")).decode()


def _decode_thought(sealed: str) -> str:
    """Decode a thought of `encode_thought`; return an empty text for another server's."""
    try:
        raw = urlsafe_b64decode(sealed)
    except (BinasciiError, ValueError):
        return ""
    thought = raw.removeprefix(_CARRIED) if raw.startswith(_CARRIED) else b""
    return thought.decode("utf-8", "replace")
