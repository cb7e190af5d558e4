"""The grammar of Gemma 4's calls: `call:NAME{key:value}`, with marks around texts alone."""

import re
from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any, Final

from fabric.limits import CALL_VALUES_DEPTH_MAX
from node.dialect.offered_tool import OfferedTool
from node.dialect.raw_text import raw_texts
from node.dialect.schema_parts import REMARKS, kinds_of, resolved
from node.dialect.writing import BLANK_LINES, Style, one_of, repeated
from node.grammar.expression import Expression, Json, Many, Maybe, OneOf, Until, row

_QUOTE: Final = '<|"|>'
_END: Final = "<tool_call|>"
_KNOWN: Final = {"type", "properties", "required", "additionalProperties"}


def write_gemma4(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write each call between marks."""

    def one(tool: OfferedTool) -> Expression:
        if re.fullmatch(r"[\w-]+", tool.name, re.ASCII) is None:
            tool.refuse("this model writes names of letters, digits, '_' and '-' only")
        return row(f"call:{tool.name}", _object(tool, tool.parameters, 0))

    call = row("<|tool_call>", one_of(tools, one), _END)
    return row(BLANK_LINES, repeated(call, "", style))


def _object(tool: OfferedTool, schema: Mapping[str, Any], depth: int) -> Expression:
    schema = resolved(schema, tool.parameters)
    more = schema.keys() - _KNOWN - REMARKS
    if more and tool.is_strict:
        tool.refuse(f"in this model's format {min(more)!r} is not enforced beside 'properties'")
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    behind = first = row()
    for key in reversed([*properties]):
        if re.fullmatch(r"\w+", key, re.ASCII) is None:
            tool.refuse(f"this model's format does not take the name {key[:100]!r}")
        value = row(f"{key}:", _value(tool, properties[key], depth + 1))
        must = key in required
        first = row(value, behind) if must else row(OneOf((row(value, behind), first)))
        behind = row(row(",", value) if must else Maybe(row(",", value)), behind)
    return row("{", first, "}")


def _value(tool: OfferedTool, schema: Any, depth: int) -> Expression:
    """Write a value of each kind that it may be of."""
    if depth > CALL_VALUES_DEPTH_MAX:
        tool.refuse(
            f"its parameters are deeper than {CALL_VALUES_DEPTH_MAX} levels, or refer to themselves"
        )
    schema = resolved(schema, tool.parameters)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return OneOf(tuple(_value(tool, each, depth + 1) for each in schema[name]))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return OneOf(tuple(_constant(tool, value) for value in values))
    kinds = kinds_of(schema, tool.parameters) or {"string"}
    return OneOf(tuple(_of_kind(tool, schema, kind, depth) for kind in sorted(kinds)))


def _of_kind(tool: OfferedTool, schema: dict[str, Any], kind: str, depth: int) -> Expression:
    if kind == "string":
        text = {**schema, "type": "string"}
        free = (Until(_QUOTE, (_QUOTE, _END), each.patterns) for each in raw_texts(tool, text))
        return row(_QUOTE, OneOf(tuple(free)))
    if kind == "object":
        return _object(tool, schema, depth)
    if kind == "array":
        item = _value(tool, schema.get("items", {}), depth + 1)
        return row("[", _items(schema, item), "]")
    return Json({**schema, "type": kind}, tool.is_strict)


def _items(schema: Mapping[str, Any], item: Expression) -> Expression:
    """Write as many as there may be; more than a few are not counted."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    following = row(",", item)
    if not isinstance(most, int) or most > 32:
        return row(item, Many(following)) if least else Maybe(row(item, Many(following)))
    rest: Expression = row()
    for index in range(most - 1, -1, -1):
        one = row(item if index == 0 else following, rest)
        rest = one if index < least else Maybe(one)
    return rest


def _constant(tool: OfferedTool, value: Any) -> Expression:
    if isinstance(value, str):
        if _QUOTE in value or _END in value:
            tool.refuse("a mark of this model's format is one of its values")
        return row(f"{_QUOTE}{value}{_QUOTE}")
    return row(dumps(value))
