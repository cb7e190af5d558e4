"""Grammars of calls as `call:NAME{key:value}`, with marks around texts alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, Final

from node.dialect.offered_tool import OfferedTool
from node.dialect.raw_text import raw_texts
from node.dialect.schema_parts import REMARKS, kinds_of, resolved
from node.dialect.writing import BLANK_LINES, Style, Write, one_of, raw_rules, repeated
from node.grammar.expression import Expression, Json, Many, Maybe, OneOf, Until, row
from node.limits import CALL_ITEMS_COUNTED_MAX, CALL_VALUES_DEPTH_MAX

_KNOWN: Final = {"type", "properties", "required", "additionalProperties"}


def write_braces(start: str, quote: str, end: str) -> Write:
    """Return how calls are written between marks, with `quote` around texts."""
    return _BraceWriter(start, quote, end).write


@dataclass(frozen=True, slots=True)
class _BraceWriter:
    start: str
    quote: str
    end: str

    def write(self, tools: Sequence[OfferedTool], style: Style) -> Expression:
        call = row(self.start, one_of(tools, self._call), self.end)
        return row(BLANK_LINES, repeated(call, "", style))

    def _call(self, tool: OfferedTool) -> Expression:
        if re.fullmatch(r"[\w.\-]+", tool.name, re.ASCII) is None:
            tool.refuse("this model writes names of letters, digits, '_', '-' and '.' only")
        return row(f"call:{tool.name}", self._object(tool, tool.parameters, 0))

    def _object(self, tool: OfferedTool, schema: Mapping[str, Any], depth: int) -> Expression:
        """Write the keys in the order in which these models' templates sort them."""
        schema = resolved(schema, tool.parameters)
        more = schema.keys() - _KNOWN - REMARKS
        if more and tool.is_strict:
            tool.refuse(f"in this model's format {min(more)!r} is not enforced beside 'properties'")
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        behind = first = row()
        for key in sorted(properties, key=str.lower, reverse=True):
            if re.fullmatch(r"[^\s,:{}\[\]<>]+", key) is None:
                tool.refuse(f"this model's format does not take the name {key[:100]!r}")
            value = row(f"{key}:", self._value(tool, properties[key], depth + 1))
            must = key in required
            first = row(value, behind) if must else row(OneOf((row(value, behind), first)))
            behind = row(row(",", value) if must else Maybe(row(",", value)), behind)
        return row("{", first, "}")

    def _value(self, tool: OfferedTool, schema: Any, depth: int) -> Expression:
        """Write a value of each kind that it may be of."""
        if depth > CALL_VALUES_DEPTH_MAX:
            most = CALL_VALUES_DEPTH_MAX
            tool.refuse(f"its parameters are deeper than {most} levels, or refer to themselves")
        schema = resolved(schema, tool.parameters)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                return OneOf(tuple(self._value(tool, each, depth + 1) for each in schema[name]))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return OneOf(tuple(self._constant(tool, value) for value in values))
        kinds = kinds_of(schema, tool.parameters) or {"string"}
        return OneOf(tuple(self._of_kind(tool, schema, kind, depth) for kind in sorted(kinds)))

    def _of_kind(
        self, tool: OfferedTool, schema: dict[str, Any], kind: str, depth: int
    ) -> Expression:
        if kind == "string":
            if tool.rules:
                return row(self.quote, raw_rules(tool, self.quote, self.quote[0]))
            text = {**schema, "type": "string"}
            free = (
                Until(self.quote, (self.quote,), each.patterns) for each in raw_texts(tool, text)
            )
            return row(self.quote, OneOf(tuple(free)))
        if kind == "object":
            return self._object(tool, schema, depth)
        if kind == "array":
            item = self._value(tool, schema.get("items", {}), depth + 1)
            return row("[", _items(schema, item), "]")
        return Json({**schema, "type": kind}, tool.is_strict)

    def _constant(self, tool: OfferedTool, value: Any) -> Expression:
        if isinstance(value, (dict, list)):
            tool.refuse("this model's format takes no object or list among fixed values")
        if not isinstance(value, str):
            return row(dumps(value))
        if self.quote in value:
            tool.refuse("a mark of this model's format is one of its values")
        return row(f"{self.quote}{value}{self.quote}")


def _items(schema: Mapping[str, Any], item: Expression) -> Expression:
    """Write as many as there may be; more than a few are not counted."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    following = row(",", item)
    if not isinstance(most, int) or most > CALL_ITEMS_COUNTED_MAX:
        some = row(item, *[following] * (min(least, CALL_ITEMS_COUNTED_MAX) - 1), Many(following))
        return some if least else Maybe(some)
    rest: Expression = row()
    for index in range(most - 1, -1, -1):
        one = row(item if index == 0 else following, rest)
        rest = one if index < least else Maybe(one)
    return rest
