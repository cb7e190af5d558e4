"""Content blocks of Anthropic's messages, and the notes that reading them leaves."""

from dataclasses import dataclass, field
from typing import Any, Final

from fabric.turn.messages import ToolUse
from router.api.conversation import BILLING_HEADER, without_billing_line
from router.api.other_content import OtherContent, OtherPart, ignored_types
from router.http.refusals import refuse
from router.http.schema import (
    AnyObject,
    ArrayOf,
    Flag,
    JsonKind,
    ObjectOf,
    Schema,
    Tagged,
    Text,
    WordIn,
    either,
    only,
    optional,
    required,
)
from router.limits import BLOCKS_PER_MESSAGE_MAX, KEY_CHARS_MAX, MESSAGE_NAME_CHARS_MAX


@dataclass(slots=True)
class Notes:
    """Side results of reading content that do not become tokens."""

    ignored: dict[str, None] = field(default_factory=dict)  # without effect; answers list it
    retain_s: float = 0.0  # the longest of the cache breakpoints

    def ignore(self, *names: str) -> None:
        self.ignored |= dict.fromkeys(names)

    def retain(self, cache_s: float | None) -> None:
        """Note a cache breakpoint: everything is cached, at least for this long."""
        self.retain_s = max(self.retain_s, cache_s or 0.0)


# A cache breakpoint, read as its lifetime in seconds.
CACHE_CONTROL: Final = Tagged(
    {"ephemeral": only("ttl", WordIn({"5m": 300.0, "1h": 3600.0}, "5m or 1h"), 300.0)},
    "expected ephemeral",
    "invalid_value",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    cache_s: float | None = optional(CACHE_CONTROL, name="cache_control")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock(_Block):
    """Text; may be empty, unlike Anthropic's, since local models give empty answers."""

    text: str = required(Text())


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUseBlock(_Block):
    """Call of a tool in an earlier answer."""

    name: str = required(Text())
    input: dict[str, Any] = required(AnyObject())
    id: str = required(Text(MESSAGE_NAME_CHARS_MAX))

    def use(self) -> ToolUse:
        return ToolUse(self.name, self.input, self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBlock:
    """Thought in an earlier answer."""

    thinking: str = required(Text())
    signature: str | None = optional(Text())


_OWN_TYPES: Final = frozenset(("text", "tool_use", "tool_result", "thinking", "redacted_thinking"))
_MISPLACED: Final = "a block of {} does not belong here"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Content: an array of blocks of these types, or a string, which is one block of text."""

    items: ArrayOf

    @classmethod
    def of(cls, **records: JsonKind) -> "Blocks":
        """Return the kind of content of these types of blocks, and of types unknown here."""
        others = OtherPart(_OWN_TYPES - records.keys(), _MISPLACED)
        blocks = Tagged(records, other=others)
        return cls(ArrayOf(blocks, BLOCKS_PER_MESSAGE_MAX, noun="blocks"))

    def read(self, value: Any, param: str) -> list[Any]:
        if isinstance(value, str):
            return [TextBlock(text=value)]
        if not isinstance(value, list):
            refuse(param, "expected a string or an array of blocks", "invalid_type")
        return self.items.read(value, param)

    def schema(self) -> Schema:
        return either(Text().schema(), self.items.schema())


_TEXT: Final = ObjectOf(TextBlock)
TEXT_BLOCKS: Final = Blocks.of(text=_TEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResultBlock(_Block):
    """Result of a tool call."""

    is_error: bool = optional(Flag(), False)
    content: list[TextBlock | OtherContent] | None = optional(TEXT_BLOCKS)
    tool_use_id: str = required(Text(KEY_CHARS_MAX))


USER_BLOCKS: Final = Blocks.of(text=_TEXT, tool_result=ObjectOf(ToolResultBlock))
ANSWER_BLOCKS: Final = Blocks.of(
    text=_TEXT,
    thinking=ObjectOf(ThinkingBlock),
    redacted_thinking=only("data", Text(), None),  # encrypted by Anthropic: no model reads it
    tool_use=ObjectOf(ToolUseBlock),
)


def drop_billing_line(text: str, notes: Notes) -> str:
    """Return a system prompt without its first line, if that is for billing."""
    kept = without_billing_line(text)
    if kept != text:
        notes.ignore(BILLING_HEADER)
    return kept


def read_text(block: TextBlock | OtherContent, notes: Notes) -> str:
    """Return a block's text or its placeholder; note omitted content."""
    if isinstance(block, OtherContent):
        notes.ignore(*ignored_types([block]))
    else:
        notes.retain(block.cache_s)
    return block.text


def joined(texts: list[str]) -> str:
    """Join the blocks of one message, which Anthropic's clients end without a line break."""
    return "\n".join(text for text in texts if text)
