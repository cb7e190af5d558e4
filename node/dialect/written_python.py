"""Grammars of calls that are Python's: `f(x=1)`, with values as JSON spells them."""

import re
from collections.abc import Sequence
from keyword import iskeyword

from node.dialect.offered_tool import OfferedTool
from node.dialect.schema_parts import Argument, parameters_of
from node.dialect.writing import BLANK_LINES, Style, Write, json_rules, one_of, repeated
from node.grammar.expression import Expression, Json, Maybe, OneOf, row

# Python reads the two halves of a character that JSON may escape as two characters.
_ESCAPES = 'nrbtf\\"'


def write_python(start: str, end: str, *, is_list: bool) -> Write:
    """Return how calls are written between marks: each by itself, or all in one list."""

    def write(tools: Sequence[OfferedTool], style: Style) -> Expression:
        call = one_of(tools, _call)
        if is_list:
            return row(BLANK_LINES, start, "[", repeated(call, ", ", style), "]", end)
        return row(BLANK_LINES, repeated(row(start, call, end), "\n", style))

    return write


def _call(tool: OfferedTool) -> Expression:
    _require_name(tool, tool.name.split("."))
    parameters = parameters_of(tool)
    _require_name(tool, [each.key for each in parameters])
    return row(f"{tool.name}(", _listed(tool, parameters), ")")


def _listed(tool: OfferedTool, parameters: Sequence[Argument]) -> Expression:
    """Write them in their order, with a comma between those that are there."""
    behind: Expression = row()  # what may come when something came before
    first: Expression = row()  # and when nothing did
    for each in reversed(parameters):
        free = Json(each.schema, tool.is_strict, _ESCAPES)
        value = row(f"{each.key}=", json_rules(tool, _ESCAPES) if tool.rules else free)
        first = row(value, behind) if each.is_required else OneOf((row(value, behind), first))
        item = row(", ", value)
        behind = row(item if each.is_required else Maybe(item), behind)
    return first


def _require_name(tool: OfferedTool, names: Sequence[str]) -> None:
    for name in names:
        if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is None or iskeyword(name):
            tool.refuse(f"this model calls tools in Python, where {name[:100]!r} is no name")
