"""What a tool's schema says of each of its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from node.dialect.offered_tool import OfferedTool

DEFINITIONS: Final[tuple[str, ...]] = ("$defs", "definitions")
_SAID: Final = frozenset({"type", "properties", "required", "additionalProperties"})
_KIND_OF: Final = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
# Words about a value that say nothing of what it may be.
REMARKS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$schema", "$id", *DEFINITIONS}
)


@dataclass(frozen=True, slots=True, eq=False)
class Argument:
    """One argument; `schema` has the definitions that it refers to."""

    key: str
    schema: dict[str, Any]
    is_required: bool


def parameters_of(tool: OfferedTool) -> list[Argument]:
    """List the arguments one by one, for formats that write them so.

    Raise RejectedError where the schema of a strict tool says more of them than that.
    """
    schema = resolved(tool.parameters, tool.parameters)
    more = schema.keys() - _SAID - REMARKS
    if more and tool.is_strict:
        tool.refuse(f"in this model's format {min(more)!r} is not enforced beside 'properties'")
    properties, required, others = (
        schema.get(name) for name in ("properties", "required", "additionalProperties")
    )
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    required = [key for key in required if isinstance(key, str)]
    named: dict[str, Any] = {
        key: others if isinstance(others, dict) else {} for key in required
    } | properties
    definitions = {key: tool.parameters[key] for key in DEFINITIONS if key in tool.parameters}
    order = dict.fromkeys([*properties, *required])
    return [
        Argument(key, {**definitions, **resolved(named[key], tool.parameters)}, key in required)
        for key in order
        if named[key] is not False
    ]


def argument_kinds(parameters: Mapping[str, Any], key: str) -> set[str]:
    """Return the types that one argument may be of; none where the schema does not say."""
    schema = resolved(parameters, parameters)
    properties = schema.get("properties")
    other = schema.get("additionalProperties")
    value = properties.get(key, other) if isinstance(properties, dict) else other
    return kinds_of(value, parameters)


def resolved(schema: Any, root: Mapping[str, Any], seen: set[str] | None = None) -> dict[str, Any]:
    """Follow references within the same document, each once; what is not found says nothing."""
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
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **beside} if isinstance(target, dict) else beside
    return {}


def kinds_of(schema: Any, root: Mapping[str, Any], seen: set[str] | None = None) -> set[str]:
    """Return the types that a value may be of; none where the schema does not say."""
    seen = set() if seen is None else seen
    schema = resolved(schema, root, seen)
    said = schema.get("type")
    kinds = {said} if isinstance(said, str) else set(said if isinstance(said, list) else ())
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for option in options if isinstance(options, list) else ():
            kinds |= kinds_of(option, root, seen)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not kinds and isinstance(values, list):
        kinds = {_KIND_OF[type(value)] for value in values if type(value) in _KIND_OF}
    return {kind for kind in kinds if isinstance(kind, str)}
