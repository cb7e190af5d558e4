"""The tools that an answer may call, as far as a format of calls has to know them."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from fabric.errors import RejectedError
from fabric.turn.call_choice import CallChoice

_COMBINED: Final = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")


@dataclass(frozen=True, slots=True, eq=False)
class OfferedTool:
    """A tool that the request offers; `parameters` is the schema of an object."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False
    rules: str = ""  # of its one argument, a text, where they come round to themselves

    def refuse(self, why: str) -> NoReturn:
        """Raise RejectedError: it cannot be called in this model's format, or not as it says."""
        raise tool_refusal(self.name, why)


def tool_refusal(name: str, why: str) -> RejectedError:
    """Say why calls of a tool cannot be enforced."""
    message = f"calls of the tool {name[:100]!r} cannot be enforced: {why}"
    return RejectedError(message, code="invalid_function_parameters", param="tools")


def offered_tools(tools: Collection[Any] | None, choice: CallChoice) -> tuple[OfferedTool, ...]:
    """List what may be called; raise RejectedError for parameters that are no object."""
    found: dict[str, OfferedTool] = {}
    rules = {text.tool: text.rules for text in choice.texts}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            continue
        if not choice.names or name in choice.names:
            parameters = _object_schema(name, function.get("parameters"))
            found[name] = OfferedTool(name, parameters, name in choice.strict, rules.get(name, ""))
    return tuple(found.values())


def _object_schema(name: str, schema: Any) -> dict[str, Any]:
    """Say of an object what is meant: it has no names but those that are told."""
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    if not isinstance(schema, dict):
        raise tool_refusal(name, "its parameters are no schema of an object")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise tool_refusal(name, "its parameters are no schema of an object")
    made = {**schema, "type": "object"}
    if schema.get("properties") and not any(key in schema for key in _COMBINED):
        made["additionalProperties"] = False
    return made
