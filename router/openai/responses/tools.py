"""Tools of the Responses API, as chat templates expect them, and how their calls are named back.

Tools of a namespace get its name as a prefix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fabric.turn.answer_constraints import ToolText
from fabric.turn.generation import ToolCall
from router.api.tool_choice import AnyTool, Function, HostedTool, hosted_types
from router.http.refusals import refuse
from router.http.schema import (
    ArrayOf,
    ObjectOf,
    Text,
    optional,
    required,
)
from router.limits import TOOLS_MAX
from router.openai.custom_tools import CustomTool

_SEPARATOR: Final = "__"


@dataclass(frozen=True, slots=True)
class ToolName:
    """Client's name of a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    is_strict: bool = False
    rules: str = ""  # of the text that it takes, if they are recursive


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools of one request: as sent, as templates get them, and by their names in templates."""

    given: list[Any] = field(default_factory=list)
    functions: list[Any] = field(default_factory=list)
    names: Mapping[str, ToolName] = field(default_factory=dict)
    strict: tuple[str, ...] = ()
    hosted: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[ToolText, ...]:
        """Rules of the texts that custom tools take."""
        return tuple(ToolText(key, name.rules) for key, name in self.names.items() if name.rules)

    def name_of(self, call: ToolCall) -> ToolName:
        """Return the client's name of the tool that a model called."""
        return self.names.get(call.name, ToolName(call.name))


def template_name(name: str, namespace: str | None) -> str:
    """Return a tool's name in templates."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function(Function):
    def named(self, namespace: str | None) -> tuple[ToolName, dict[str, Any]]:
        declaration = {"description": self.description, "parameters": self.parameters}
        template_form = {key: value for key, value in declaration.items() if value is not None}
        return ToolName(self.name, namespace, False, self.strict), template_form


@dataclass(frozen=True, slots=True, kw_only=True)
class _Custom(CustomTool):
    def named(self, namespace: str | None) -> tuple[ToolName, dict[str, Any]]:
        function = self.function()
        name = ToolName(self.name, namespace, True, function.is_strict, function.rules)
        return name, function.declaration


_OWN: Final[dict[str, ObjectOf[Any]]] = {
    "function": ObjectOf(_Function),
    "custom": ObjectOf(_Custom),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Namespace:
    name: str = required(Text(chars_min=1))
    description: str | None = optional(Text())
    tools: list[_Function | _Custom | HostedTool] | None = optional(
        ArrayOf(AnyTool(_OWN), TOOLS_MAX)
    )

    def hosted(self) -> tuple[str, ...]:
        """Return the types of its hosted tools."""
        return hosted_types(self.tools or ())


ResponsesTool = _Function | _Custom | _Namespace | HostedTool
TOOLS: Final = ArrayOf(AnyTool({**_OWN, "namespace": ObjectOf(_Namespace)}), TOOLS_MAX)


def tools_of(tools: list[ResponsesTool], given: list[Any]) -> Tools:
    """Return a request's tools; `given` are the same as they were sent."""
    functions: list[Any] = []
    names: dict[str, ToolName] = {}
    hosted = dict.fromkeys(hosted_types(tools))
    for tool in tools:
        if isinstance(tool, HostedTool):
            continue
        if isinstance(tool, _Namespace):
            hosted |= dict.fromkeys(tool.hosted())
        for name, declaration in _tool_names(tool):
            key = template_name(name.name, name.namespace)
            names[key] = name
            functions.append({"type": "function", "function": {"name": key, **declaration}})
    if len(functions) > TOOLS_MAX:
        refuse("tools", f"more than {TOOLS_MAX} items in all namespaces")
    strict = tuple(key for key, name in names.items() if name.is_strict)
    return Tools(given, functions, names, strict, tuple(hosted))


def _tool_names(
    tool: _Function | _Custom | _Namespace,
) -> Iterator[tuple[ToolName, dict[str, Any]]]:
    if isinstance(tool, _Namespace):
        client_tools = (inner for inner in tool.tools or () if not isinstance(inner, HostedTool))
        yield from (inner.named(tool.name) for inner in client_tools)
    else:
        yield tool.named(None)
