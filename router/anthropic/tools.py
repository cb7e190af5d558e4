"""Anthropic's tools and tool_choice, as chat templates expect tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabric.turn.answer_constraints import CallChoice
from router.anthropic.content import CACHE_CONTROL, Notes
from router.http.refusals import refuse, require_text, unsupported
from router.http.schema import (
    AnyObject,
    ArrayOf,
    Flag,
    ObjectOf,
    Parsed,
    Text,
    optional,
    refuse_missing,
    required,
    words,
)
from router.limits import TOOLS_MAX


def _tool_type(value: Any, param: str) -> str:
    kind = require_text(value, param)
    if kind != "custom":
        why = f"{kind[:64]!r} runs at Anthropic; define a tool of your own with an input_schema"
        unsupported(param, why)
    return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Declaration of a tool."""

    type: str | None = optional(Parsed(_tool_type, words("custom").schema()))
    name: str = required(Text(chars_min=1))
    cache_s: float | None = optional(CACHE_CONTROL, name="cache_control")
    strict: bool = optional(Flag(), False)
    description: str | None = optional(Text())
    input_schema: dict[str, Any] = required(AnyObject())

    def function(self) -> dict[str, Any]:
        """Return the tool as templates get it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


TOOLS: Final = ArrayOf(ObjectOf(Tool), TOOLS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tools an answer calls."""

    type: str = required(words("auto", "any", "tool", "none"))
    disable_parallel_tool_use: bool = optional(Flag(), False)
    name: str | None = optional(Text())


TOOL_CHOICE: Final = ObjectOf(ToolChoice)


def functions_of(tools: Sequence[Tool], notes: Notes) -> list[Any]:
    """Return tools as templates get them."""
    for tool in tools:
        notes.retain(tool.cache_s)
    return [tool.function() for tool in tools]


def call_choice(choice: ToolChoice | None, tools: Sequence[Tool]) -> tuple[bool, CallChoice]:
    """Return whether calls are read, and which of `tools` may or must be called."""
    strict = tuple(tool.name for tool in tools if tool.strict)
    if choice is None:
        return True, CallChoice(strict=strict)
    takes_one = choice.disable_parallel_tool_use
    if choice.type == "none":
        return False, CallChoice()
    if choice.type == "auto":
        return True, CallChoice(strict=strict, takes_one=takes_one)
    if not tools:
        refuse("tool_choice.type", "it is only allowed with tools")
    if choice.type == "any":
        return True, CallChoice(True, (), strict, takes_one)
    if choice.name is None:
        refuse_missing("tool_choice.name")
    if all(tool.name != choice.name for tool in tools):
        refuse("tool_choice.name", f"there is no tool {choice.name[:64]!r} in 'tools'")
    return True, CallChoice(True, (choice.name,), strict, takes_one)
