"""Tools of the Responses API, as chat templates expect them, and how their calls are named back.

Tools of a namespace get its name in front of theirs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fabric.turn.generation import ToolCall
from fabric.turn.text_rules import ToolText
from router.http.fields import Fields, refuse, require_object, require_text, unsupported
from router.limits import TOOLS_MAX
from router.openai.custom_tools import custom_function

_SEPARATOR: Final = "__"
# Run by OpenAI and offered by every coding agent: the model is not told of them.
_HOSTED: Final = ("web_search", "image_generation", "tool_search")


@dataclass(frozen=True, slots=True)
class ToolName:
    """Client's name of a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_strict: bool = False
    rules: str = ""  # of the text that it takes, where they come round


@dataclass(frozen=True, slots=True)
class Tools:
    """All of one request: as given, as templates get them, and by the name they get there."""

    given: list[Any] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    names: Mapping[str, ToolName] = field(default_factory=dict)
    strict: tuple[str, ...] = ()
    hosted: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[ToolText, ...]:
        """What the texts of custom tools have to follow."""
        return tuple(ToolText(key, name.rules) for key, name in self.names.items() if name.rules)

    def name_of(self, call: ToolCall) -> ToolName:
        """Return what the client calls the tool that a model called."""
        return self.names.get(call.name, ToolName(call.name))


def template_name(name: str, namespace: str | None) -> str:
    """Name a tool as a template does."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def parse_tools(fields: Fields) -> Tools:
    """Check `tools`."""
    given = fields.items("tools", TOOLS_MAX) or []
    functions: list[Any] = []
    names: dict[str, ToolName] = {}
    hosted: dict[str, None] = {}
    for index, item in enumerate(given):
        inner = Fields(require_object(item, f"tools[{index}]"), f"tools[{index}].")
        kind = require_text(inner.require("type"), inner.param("type"))
        if kind.startswith(_HOSTED):
            hosted[_headed(kind)] = None
            continue
        for name, function in _tools(kind, inner):
            key = template_name(name.name, name.namespace)
            names[key] = name
            functions.append({"type": "function", "function": {"name": key, **function}})
    if len(functions) > TOOLS_MAX:
        refuse("tools", f"more than {TOOLS_MAX} items in all namespaces")
    strict = tuple(key for key, name in names.items() if name.is_strict)
    return Tools(given, functions, names, strict, tuple(hosted))


def _headed(kind: str) -> str:
    """Return a client's word as a header of the answer may have it."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in kind[:64])


def _tools(kind: str, fields: Fields) -> Iterator[tuple[ToolName, dict[str, Any]]]:
    if kind != "namespace":
        yield _tool(kind, fields, None)
        return
    namespace = _name(fields)
    fields.text("description")
    param = fields.param("tools")
    for index, item in enumerate(fields.items("tools", TOOLS_MAX) or []):
        inner = Fields(require_object(item, f"{param}[{index}]"), f"{param}[{index}].")
        inner_kind = require_text(inner.require("type"), inner.param("type"))
        yield _tool(inner_kind, inner, namespace)


def _tool(kind: str, fields: Fields, namespace: str | None) -> tuple[ToolName, dict[str, Any]]:
    if kind not in ("function", "custom"):
        why = f"{kind[:64]!r} is not run here; functions and custom tools are"
        unsupported(fields.param("type"), why)
    name = _name(fields)
    if kind == "custom":
        made = custom_function(fields)
        return ToolName(name, namespace, True, made.is_strict, made.rules), made.spelled
    said = {"description": fields.text("description"), "parameters": fields.object("parameters")}
    spelled = {key: value for key, value in said.items() if value is not None}
    return ToolName(name, namespace, False, fields.flag("strict")), spelled


def _name(fields: Fields) -> str:
    name = require_text(fields.require("name"), fields.param("name"))
    if not name:
        refuse(fields.param("name"), "it is empty")
    return name
