"""Anthropic's tools and tool_choice, as chat templates expect tools."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabric.turn.answer_constraints import CallChoice
from router.anthropic.content import CACHE_CONTROL, Notes
from router.api.shared_fields import FLAG_OR_WORD
from router.api.tool_choice import AnyTool, HostedTool, hosted_types
from router.http.refusals import refuse
from router.http.schema import (
    AnyObject,
    ArrayOf,
    Flag,
    ObjectOf,
    Text,
    optional,
    refuse_missing,
    required,
    words,
)
from router.limits import TOOLS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Declaration of a tool."""

    name: str = required(Text(chars_min=1))
    cache_s: float | None = optional(CACHE_CONTROL, name="cache_control")
    strict: bool = optional(FLAG_OR_WORD, False)
    description: str | None = optional(Text())
    input_schema: dict[str, Any] = required(AnyObject())

    def function(self) -> dict[str, Any]:
        """Return the tool as templates get it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


_REFUSAL: Final = "a tool with an input_schema has the type 'custom', not {}"
_TOOL: Final = AnyTool(
    {"custom": ObjectOf(Tool)}, _REFUSAL, declares="input_schema", default="custom"
)
TOOLS: Final = ArrayOf(_TOOL, TOOLS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Choice of the tools that an answer calls."""

    type: str = required(words("auto", "any", "tool", "none"))
    disable_parallel_tool_use: bool = optional(Flag(), False)
    name: str | None = optional(Text())


TOOL_CHOICE: Final = ObjectOf(ToolChoice)


def functions_of(tools: Sequence[Tool | HostedTool], notes: Notes) -> list[Any]:
    """Return the tools as chat templates take them; drop hosted tools, and note them as ignored."""
    notes.ignore(*hosted_types(tools))
    client_tools = [tool for tool in tools if isinstance(tool, Tool)]
    for tool in client_tools:
        notes.retain(tool.cache_s)
    return [tool.function() for tool in client_tools]


def call_choice(
    choice: ToolChoice | None, all_tools: Sequence[Tool | HostedTool]
) -> tuple[bool, CallChoice]:
    """Return whether calls are read, and which of the tools may or must be called."""
    tools = [tool for tool in all_tools if isinstance(tool, Tool)]
    strict = tuple(tool.name for tool in tools if tool.strict)
    if choice is None:
        return True, CallChoice(strict=strict)
    takes_one = choice.disable_parallel_tool_use
    if choice.type == "none":
        return False, CallChoice()
    if choice.type == "auto":
        return True, CallChoice(strict=strict, takes_one=takes_one)
    if not tools:
        why = "it requires a tool with an input_schema: hosted tools are not run here"
        refuse("tool_choice.type", why if all_tools else "it is only allowed with tools")
    if choice.type == "any":
        return True, CallChoice(True, (), strict, takes_one)
    if choice.name is None:
        refuse_missing("tool_choice.name")
    if any(isinstance(tool, HostedTool) and tool.name == choice.name for tool in all_tools):
        refuse("tool_choice.name", f"the hosted tool {choice.name[:64]!r} is not run here")
    if all(tool.name != choice.name for tool in tools):
        refuse("tool_choice.name", f"there is no tool {choice.name[:64]!r} in 'tools'")
    return True, CallChoice(True, (choice.name,), strict, takes_one)
