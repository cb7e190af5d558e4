"""Calls in Python's syntax: `f(x=1)`, alone or in a list."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from node.dialect.tool_schema import Argument, ToolSpec, tool_arguments, tool_names
from node.grammar.expression import Expression, Json, Maybe, OneOf, row
from node.limits import CALL_CODE_CHARS_MAX, CALL_HEADER_CHARS_MAX, CALL_ITEMS_COUNTED_MAX

_CALL = re.compile(r"[\[\s]*([A-Za-z_][\w.]*)\s*\(")
_MAYBE_CALL = re.compile(r"[\[\s]*(?:[A-Za-z_][\w.]*)?\s*\(?")
_NAME_BEFORE = re.compile(r"([A-Za-z_][\w.]*)\s*$")
# Brackets and commas outside of strings; an open string is a match that is none of these.
_STRUCTURE = re.compile(
    r"""[()\[\]{},]|"(?:[^"\\]|\\.)*(?:"|$)|'(?:[^'\\]|\\.)*(?:'|$)""", re.DOTALL
)
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
        calls = _parse_calls(text)
        if calls is None:
            self._begin_last(text)
            return
        self._take(len(self._unread))
        for name, arguments in calls:
            self._start_call(name)
            self._add_arguments(arguments)
            self._end_call()

    def _begin_last(self, text: str) -> None:
        """Read calls of which the last one is cut or malformed, as far as they can be parsed."""
        names = tool_names(self.tools)
        calls = _begun_calls(text)
        self.has_failed = not calls or any(call.name not in names for call in calls)
        self._take(0 if self.has_failed else len(self._unread))
        for call in () if self.has_failed else calls:
            parsed = _parse_calls(f"{call.name}({call.arguments})") if call.is_closed else None
            self._start_call(call.name)
            self._add_arguments(parsed[0][1] if parsed else _known_arguments(call))
            if parsed is None:
                break
            self._end_call()


@dataclass(slots=True)
class _BegunCall:
    """Call in a text that cannot be parsed: its name, and the source of its arguments."""

    name: str
    arguments: str = ""
    commas: list[int] = field(default_factory=list)  # places in `arguments`
    is_closed: bool = False


def _begun_calls(text: str) -> list[_BegunCall]:
    """Find the calls of a list, or a call alone, by brackets and quotes only."""
    calls: list[_BegunCall] = []
    outside = 1 if text.startswith("[") else 0
    depth, start = 0, -1
    for match in _STRUCTURE.finditer(text):
        at, char = match.start(), match[0]
        if char in "([{":
            name = _NAME_BEFORE.search(text, 0, at) if char == "(" and depth == outside else None
            if name is not None:
                start = at + 1
                calls.append(_BegunCall(name[1].removesuffix(".call"), text[start:]))
            depth += 1
        elif char in ")]}":
            depth -= 1
            if calls and depth == outside and not calls[-1].is_closed:
                calls[-1].arguments, calls[-1].is_closed = text[start:at], True
        elif char == "," and calls and depth == outside + 1:
            calls[-1].commas.append(at - start)
    return calls


def _known_arguments(call: _BegunCall) -> str:
    """Return the arguments that are whole, in JSON without its end."""
    for comma in reversed(call.commas[-CALL_ITEMS_COUNTED_MAX:]):
        parsed = _parse_calls(f"{call.name}({call.arguments[:comma]})")
        if parsed is not None:
            return parsed[0][1].removesuffix("}")
    return ""


def _parse_calls(text: str) -> list[tuple[str, str]] | None:
    try:
        return [_parse_call(node) for node in _nodes(ast.parse(text, mode="eval").body)]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


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
