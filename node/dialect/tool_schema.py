"""The tools that an answer may call, and each argument's JSON schema."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import CallChoice
from fabric.turn.schema_keywords import (
    ANNOTATIONS,
    DEFINITIONS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SCHEMAS,
    VALUES,
)

_OBJECT_KEYWORDS: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_COMBINED: Final = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties")
_TYPE_NAMES: Final = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


@dataclass(frozen=True, slots=True, eq=False)
class ToolSpec:
    """Tool of a request that may be called; `parameters` is the schema of an object."""

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False
    rules: str = ""  # recursive rules of its one argument, a text

    def refuse(self, reason: str) -> NoReturn:
        """Raise RejectedError: this model's format cannot enforce the tool's calls."""
        raise tool_refusal(self.name, reason)


def tool_names(tools: Collection[Any] | None) -> frozenset[str]:
    """Return the names of a request's tools."""
    functions = (tool.get("function", tool) for tool in tools or () if isinstance(tool, dict))
    names = (function.get("name") for function in functions if isinstance(function, dict))
    return frozenset(name for name in names if isinstance(name, str))


def tool_refusal(name: str, reason: str) -> RejectedError:
    """Return the error for a tool whose calls cannot be enforced."""
    message = f"calls of the tool {name[:100]!r} cannot be enforced: {reason}"
    return RejectedError(message, code="invalid_function_parameters", param="tools")


def callable_tools(tools: Collection[Any] | None, choice: CallChoice) -> tuple[ToolSpec, ...]:
    """List the tools that may be called; raise RejectedError for parameters of another type."""
    specs: dict[str, ToolSpec] = {}
    rules = {text.tool: text.rules for text in choice.texts}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            continue
        if not choice.names or name in choice.names:
            parameters = _object_schema(name, function.get("parameters"))
            specs[name] = ToolSpec(name, parameters, name in choice.strict, rules.get(name, ""))
    return tuple(specs.values())


def _object_schema(name: str, schema: Any) -> dict[str, Any]:
    """Return the schema, closed to properties that it does not name."""
    if schema is None:
        schema = {"properties": {}, "additionalProperties": False}
    else:
        schema = plain_schema(schema)
    type_ = schema.get("type", "object") if isinstance(schema, dict) else None
    if type_ != "object" and not (isinstance(type_, list) and "object" in type_):
        raise tool_refusal(name, "its parameters are not the schema of an object")
    closed = {**schema, "type": "object"}
    if schema.get("properties") and not any(key in schema for key in _COMBINED):
        closed["additionalProperties"] = False
    return closed


def template_tools(tools: list[Any] | None) -> list[Any] | None:
    """Return tools as chat templates can read them: each has an object of properties.

    The tools as sent decide which calls are allowed.
    """
    return None if tools is None else [_template_tool(tool) for tool in tools]


def _template_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    shown = {key: value for key, value in function.items() if value is not None}
    parameters = plain_schema(shown.get("parameters", {}), for_template=True)
    if isinstance(parameters, dict):
        typed = {} if "type" in parameters else {"type": "object"}
        parameters = {**typed, **parameters}
        parameters.setdefault("properties", {})
    return {**tool, "function": {**shown, "parameters": parameters}}


def plain_schema(schema: Any, *, for_template: bool = False) -> Any:
    """Return an equal schema without null keywords, and with `{}` for subschemas of true or null.

    A template gets no subschema that is `false`: it allows no value.
    """
    if schema is True or schema is None:
        return {}
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in VALUES and not (key == "enum" and value is None):
            plain[key] = value
        elif value is None:
            continue
        elif key in SCHEMA_MAPS and isinstance(value, dict):
            plain[key] = {
                name: plain_schema(item, for_template=for_template)
                for name, item in value.items()
                if not (for_template and item is False)
            }
        elif key in SCHEMA_LISTS and isinstance(value, list):
            items = (item for item in value if not (for_template and item is False))
            plain[key] = [plain_schema(item, for_template=for_template) for item in items]
        elif key in SCHEMAS and not (for_template and value is False):
            plain[key] = plain_schema(value, for_template=for_template)
        elif key not in SCHEMAS:
            plain[key] = value
    return plain


@dataclass(frozen=True, slots=True, eq=False)
class Argument:
    """Argument of a tool; `schema` includes the definitions that it refers to."""

    key: str
    schema: dict[str, Any]
    is_required: bool


def tool_arguments(tool: ToolSpec) -> list[Argument]:
    """List a tool's arguments, for formats that write them one by one.

    Raise RejectedError where a strict tool's schema constrains more than single arguments.
    """
    schema = resolve(tool.parameters, tool.parameters)
    unsupported = schema.keys() - _OBJECT_KEYWORDS - ANNOTATIONS
    if unsupported and tool.is_strict:
        keyword = min(unsupported)
        tool.refuse(f"in this model's format {keyword!r} is not enforced beside 'properties'")
    properties, required, others = (
        schema.get(name) for name in ("properties", "required", "additionalProperties")
    )
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    required = [key for key in required if isinstance(key, str)]
    schemas: dict[str, Any] = {
        key: others if isinstance(others, dict) else {} for key in required
    } | properties
    definitions = {key: tool.parameters[key] for key in DEFINITIONS if key in tool.parameters}
    order = dict.fromkeys([*properties, *required])
    return [
        Argument(key, {**definitions, **resolve(schemas[key], tool.parameters)}, key in required)
        for key in order
        if schemas[key] is not False
    ]


def argument_types(parameters: Mapping[str, Any], key: str) -> set[str]:
    """Return the types that an argument may have; none if the schema gives none."""
    schema = resolve(parameters, parameters)
    properties = schema.get("properties")
    other = schema.get("additionalProperties")
    value = properties.get(key, other) if isinstance(properties, dict) else other
    return value_types(value, parameters)


def tool_parameters(tools: Collection[Any] | None, name: str) -> dict[str, Any]:
    """Return the schema of a tool's arguments; empty for an unknown tool."""
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def member_schema(
    schema: Any, key: str | None, root: Mapping[str, Any], seen: set[str] | None = None
) -> dict[str, Any]:
    """Return the schema of an object's member, or without a key of a list's items."""
    seen = set() if seen is None else seen
    schema = resolve(schema, root, seen)
    properties = schema.get("properties")
    if key is None:
        member = schema.get("items")
    elif isinstance(properties, dict) and key in properties:
        member = properties[key]
    else:
        member = schema.get("additionalProperties")
    if isinstance(member, dict):
        return member
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            member = member_schema(option, key, root, seen)
            if member:
                return member
    return {}


def resolve(schema: Any, root: Mapping[str, Any], seen: set[str] | None = None) -> dict[str, Any]:
    """Follow references within the document, each once; an unknown one constrains nothing."""
    seen = set() if seen is None else seen
    while isinstance(schema, dict):
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = None if reference in seen else root
        seen.add(reference)
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            target = target.get(name) if isinstance(target, dict) else None
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **siblings} if isinstance(target, dict) else siblings
    return {}


def value_types(schema: Any, root: Mapping[str, Any], seen: set[str] | None = None) -> set[str]:
    """Return the types that a value may have; none if the schema gives none."""
    seen = set() if seen is None else seen
    schema = resolve(schema, root, seen)
    stated = schema.get("type")
    types = {stated} if isinstance(stated, str) else set(stated if isinstance(stated, list) else ())
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            types |= value_types(option, root, seen)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not types and isinstance(values, list):
        types = {_TYPE_NAMES[type(value)] for value in values if type(value) in _TYPE_NAMES}
    return {type_ for type_ in types if isinstance(type_, str)}
