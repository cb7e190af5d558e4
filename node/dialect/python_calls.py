"""Calls in Python's syntax: `f(x=1)`, alone or in a list."""

import ast
import re
from collections.abc import Sequence
from json import dumps
from keyword import iskeyword
from typing import Any

from node.dialect.call_grammar import (
    BLANK_LINES,
    CallGrammar,
    GrammarOptions,
    one_of,
    repeat,
    rules_string,
)
from node.dialect.call_reader import CallReader
from node.dialect.tool_schema import Argument, ToolSpec, tool_arguments
from node.grammar.expression import Expression, Json, Maybe, OneOf, row
from node.limits import CALL_CODE_CHARS_MAX, CALL_HEADER_CHARS_MAX

_CALL = re.compile(r"[\[\s]*([A-Za-z_][\w.]*)\s*\(")
_MAYBE_CALL = re.compile(r"[\[\s]*(?:[A-Za-z_][\w.]*)?\s*\(?")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
# JSON may escape half of a surrogate pair, which Python reads as a character of its own.
_ESCAPES = 'nrbtf\\"'


class PythonCallReader(CallReader):
    """Reader that parses calls when they are complete; only names are checked before."""

    def __init__(self, tools: list[Any] | None, names: frozenset[str] | None) -> None:
        super().__init__(tools)
        self._allowed = names

    @property
    def is_in_value(self) -> bool:
        return self.is_enforced and '"' in _QUOTED.sub("", self._unread)

    def _read(self) -> None:
        if self._allowed is None:
            return
        call = _CALL.match(self._unread[:CALL_HEADER_CHARS_MAX])
        if call is not None:
            name = call[1].removesuffix(".call")
            self.has_failed = name not in self._allowed
        else:
            prefix = _MAYBE_CALL.match(self._unread)
            self.has_failed = prefix is None or prefix.end() < len(self._unread)

    def _finish(self, *, is_cut: bool) -> None:
        text = self._unread.strip()
        if len(text) > CALL_CODE_CHARS_MAX:
            self.has_failed = True
            return
        try:
            calls = [_parse_call(node) for node in _nodes(ast.parse(text, mode="eval").body)]
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            self.has_failed = True
            return
        self._take(len(self._unread))
        for name, arguments in calls:
            self._start_call(name)
            self._add_arguments(arguments)
            self._end_call()


def _nodes(parsed: ast.expr) -> list[ast.expr]:
    return parsed.elts if isinstance(parsed, ast.List | ast.Tuple) else [parsed]


def _parse_call(node: ast.expr) -> tuple[str, str]:
    """Return a call's name and arguments in JSON; raise ValueError unless all are by keyword."""
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        message = "not a call with keyword arguments only"
        raise ValueError(message)
    arguments = {
        str(k.arg): ast.literal_eval(_JsonConstants().visit(k.value)) for k in node.keywords
    }
    try:
        encoded = dumps(arguments, ensure_ascii=False)
    except TypeError as error:  # a set, bytes
        raise ValueError(str(error)) from None
    return ast.unparse(node.func).removesuffix(".call"), encoded


class _JsonConstants(ast.NodeTransformer):
    """Reads JSON's constants, which models mix into Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_CONSTANTS[node.id]) if node.id in _JSON_CONSTANTS else node


def python_grammar(start: str, end: str, *, is_list: bool) -> CallGrammar:
    """Return the grammar of calls between marks: each alone, or all in one list."""

    def grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
        call = one_of(tools, _call)
        if is_list:
            return row(BLANK_LINES, start, "[", repeat(call, ", ", options), "]", end)
        return row(BLANK_LINES, repeat(row(start, call, end), "\n", options))

    return grammar


def _call(tool: ToolSpec) -> Expression:
    _require_identifiers(tool, tool.name.split("."))
    arguments = tool_arguments(tool)
    _require_identifiers(tool, [argument.key for argument in arguments])
    return row(f"{tool.name}(", _argument_list(tool, arguments), ")")


def _argument_list(tool: ToolSpec, arguments: Sequence[Argument]) -> Expression:
    """Return the arguments in order, with commas between those that are present."""
    following: Expression = row()  # what may come after an argument
    first: Expression = row()  # what may come before any
    for argument in reversed(arguments):
        free = Json(argument.schema, tool.is_strict, _ESCAPES)
        value = row(f"{argument.key}=", rules_string(tool, _ESCAPES) if tool.rules else free)
        is_required = argument.is_required
        first = row(value, following) if is_required else OneOf((row(value, following), first))
        item = row(", ", value)
        following = row(item if is_required else Maybe(item), following)
    return first


def _require_identifiers(tool: ToolSpec, names: Sequence[str]) -> None:
    for name in names:
        if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is None or iskeyword(name):
            tool.refuse(f"this model calls tools in Python, where {name[:100]!r} is not a name")
