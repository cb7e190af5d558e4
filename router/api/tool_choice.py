"""Which tools an answer calls, as OpenAI's APIs have it: in objects of their own, or flat."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from fabric.turn.call_choice import CallChoice
from fabric.turn.text_rules import ToolText
from router.http.fields import Fields, refuse, require_object, require_text, unsupported
from router.limits import TOOLS_MAX

_CALLED: Final = ("function", "custom")


def parse_tool_choice(
    fields: Fields,
    names: Collection[str],
    strict: tuple[str, ...] = (),
    texts: tuple[ToolText, ...] = (),
) -> tuple[bool, CallChoice]:
    """Say whether calls are read, and which may or must come; `names` are those of the tools."""
    reads_calls, choice = _parsed(fields, names, strict)
    return reads_calls, replace(choice, texts=texts) if reads_calls else choice


def _parsed(
    fields: Fields, names: Collection[str], strict: tuple[str, ...]
) -> tuple[bool, CallChoice]:
    choice = fields.raw("tool_choice")
    parallel = fields.raw("parallel_tool_calls")
    takes_one = parallel is not None and not fields.flag("parallel_tool_calls")
    if choice == "none":
        return False, CallChoice()
    if choice in (None, "auto"):
        return True, CallChoice(strict=strict, takes_one=takes_one)
    if choice == "required":
        _require_some(fields, names)
        return True, CallChoice(True, (), strict, takes_one)
    if not isinstance(choice, dict):
        refuse(fields.param("tool_choice"), "expected none, auto, required or an object")
    inner = Fields(choice, fields.param("tool_choice."))
    kind = require_text(inner.require("type"), inner.param("type"))
    if kind == "allowed_tools":
        must_call, allowed = _allowed(inner, names)
        return True, CallChoice(must_call, allowed, strict, takes_one)
    return True, CallChoice(True, (_named(inner, kind, names),), strict, takes_one=True)


def parse_function_choice(
    fields: Fields, tools: Collection[Mapping[str, Any]], texts: tuple[ToolText, ...] = ()
) -> tuple[bool, CallChoice]:
    """Do so for tools that are functions."""
    functions = [tool["function"] for tool in tools]
    strict = tuple(each["name"] for each in functions if each.get("strict"))
    return parse_tool_choice(fields, {each["name"] for each in functions}, strict, texts)


def _allowed(fields: Fields, names: Collection[str]) -> tuple[bool, tuple[str, ...]]:
    form = fields.object("allowed_tools")
    inner = fields if form is None else Fields(form, fields.param("allowed_tools."))
    mode = require_text(inner.require("mode"), inner.param("mode"))
    if mode not in ("auto", "required"):
        refuse(inner.param("mode"), "expected auto or required")
    param = inner.param("tools")
    found: dict[str, None] = {}
    for index, item in enumerate(inner.items("tools", TOOLS_MAX) or []):
        each = Fields(require_object(item, f"{param}[{index}]"), f"{param}[{index}].")
        found[_named(each, require_text(each.require("type"), each.param("type")), names)] = None
    if not found:
        refuse(param, "it is empty")
    return mode == "required", tuple(found)


def _named(fields: Fields, kind: str, names: Collection[str]) -> str:
    if kind not in _CALLED:
        unsupported(fields.param("type"), f"{kind[:64]!r} is not run here")
    form = fields.object(kind)
    inner = fields if form is None else Fields(form, fields.param(f"{kind}."))
    name = require_text(inner.require("name"), inner.param("name"))
    namespace = fields.text("namespace")
    full = name if namespace is None else f"{namespace}__{name}"
    if full not in names:
        refuse(inner.param("name"), f"there is no tool {name[:64]!r} in 'tools'")
    return full


def _require_some(fields: Fields, names: Collection[Any]) -> None:
    if not names:
        refuse(fields.param("tool_choice"), "it is only allowed with tools")
