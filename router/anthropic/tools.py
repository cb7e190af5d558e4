"""Anthropic's tools and tool_choice, as chat templates expect tools."""

from typing import Any, Final

from fabric.turn.call_choice import CallChoice
from router.anthropic.content import Notes, note_cache_control
from router.http.fields import Fields, refuse, require_object, require_text, unsupported
from router.limits import TOOLS_MAX

_CHOICES: Final = ("auto", "any", "tool", "none")


def parse_tools(fields: Fields, notes: Notes) -> list[Any]:
    """Check `tools` and spell them as functions."""
    found = []
    for index, item in enumerate(fields.items("tools", TOOLS_MAX) or []):
        param = f"{fields.param('tools')}[{index}]"
        found.append(_tool(Fields(require_object(item, param), f"{param}."), notes))
    return found


def _tool(fields: Fields, notes: Notes) -> dict[str, Any]:
    kind = fields.text("type")
    if kind not in (None, "custom"):
        why = f"{kind[:64]!r} runs at Anthropic; define a tool of your own with an input_schema"
        unsupported(fields.param("type"), why)
    name = require_text(fields.require("name"), fields.param("name"))
    if not name:
        refuse(fields.param("name"), "it is empty")
    note_cache_control(fields, notes)
    fields.flag("strict")
    function: dict[str, Any] = {"name": name}
    description = fields.text("description")
    if description is not None:
        function["description"] = description
    schema = require_object(fields.require("input_schema"), fields.param("input_schema"))
    function["parameters"] = schema
    return {"type": "function", "function": function}


def parse_choice(fields: Fields, tools: list[Any]) -> tuple[bool, CallChoice]:
    """Say whether calls are read, and which of `tools` may or must come, and how often."""
    names = [tool["function"]["name"] for tool in tools]
    given = zip(names, fields.raw("tools") or (), strict=True)
    strict = tuple(name for name, tool in given if tool.get("strict"))
    choice = fields.object("tool_choice")
    if choice is None:
        return True, CallChoice(strict=strict)
    inner = Fields(choice, fields.param("tool_choice."))
    kind = require_text(inner.require("type"), inner.param("type"))
    if kind not in _CHOICES:
        refuse(inner.param("type"), f"expected one of {', '.join(_CHOICES)}")
    takes_one = inner.flag("disable_parallel_tool_use")
    if kind == "none":
        return False, CallChoice()
    if kind == "auto":
        return True, CallChoice(strict=strict, takes_one=takes_one)
    if not names:
        refuse(inner.param("type"), "it is only allowed with tools")
    if kind == "any":
        return True, CallChoice(True, (), strict, takes_one)
    name = require_text(inner.require("name"), inner.param("name"))
    if name not in names:
        refuse(inner.param("name"), f"there is no tool {name[:64]!r} in 'tools'")
    return True, CallChoice(True, (name,), strict, takes_one)
