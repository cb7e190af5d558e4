"""Calls that may be JSON or Python, which only their first character tells."""

import ast
import re
from json import dumps
from typing import Any

from node.dialect.call_body import CallBody, Part
from node.dialect.json_calls import JsonCalls
from node.limits import CALL_CODE_CHARS_MAX, CALL_HEADER_CHARS_MAX

_CALL = re.compile(r"[\[\s]*([A-Za-z_][\w.]*)\s*\(")
_MAYBE_CALL = re.compile(r"[\[\s]*(?:[A-Za-z_][\w.]*)?\s*\(?")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORDS = {"true": True, "false": False, "null": None}


class BareCalls(CallBody):
    """`{"name": …}` or `[f(x=1)]`, of tools that there are; `otherwise` reads all else."""

    def __init__(
        self, tools: list[Any] | None, otherwise: CallBody | None = None, *, is_marked: bool = False
    ) -> None:
        """Take any name where a mark says that a call comes."""
        super().__init__(tools)
        names = None if is_marked else tool_names(tools)
        self._names = names
        self._otherwise = otherwise
        self._inner: CallBody | None = None

    @property
    def is_in_value(self) -> bool:
        return self._inner is not None and self._inner.is_in_value

    def feed(self, text: str) -> list[Part]:
        if self._inner is not None:
            return self._follow(self._inner.feed(text))
        self._left += text
        first = self._left.lstrip()
        if not first:
            return []
        is_json = first[0] == "{" or (first[0] == "[" and first[1:].lstrip()[:1] == "{")
        if first[0] == "[" and not first[1:].strip():
            return []
        if is_json:
            # Mistral's have an id, behind the arguments.
            has_id_last = self._otherwise is not None
            self._inner = JsonCalls(self.tools, self._names, has_id_last=has_id_last)
        else:
            self._inner = self._otherwise or PythonCalls(self.tools, self._names)
        self._inner.is_enforced, self._inner.names = self.is_enforced, self.names
        left, self._left = self._left, ""
        return self._follow(self._inner.feed(left))

    def close(self, *, is_cut: bool) -> list[Part]:
        if self._inner is None:
            self.has_failed = True
            return []
        return self._follow(self._inner.close(is_cut=is_cut))

    def _follow(self, parts: list[Part]) -> list[Part]:
        assert self._inner is not None, "it has read them"
        self.has_failed = self._inner.has_failed
        self.calls_count, self.read_chars = self._inner.calls_count, self._inner.read_chars
        return parts


class PythonCalls(CallBody):
    """`f(x=1)`, in a list or not: read at their end, for a name may be one of the language's."""

    def __init__(self, tools: list[Any] | None, names: frozenset[str] | None) -> None:
        super().__init__(tools)
        self._allowed = names

    @property
    def is_in_value(self) -> bool:
        return self.is_enforced and '"' in _QUOTED.sub("", self._left)

    def _read(self) -> None:
        if self._allowed is None:
            return
        found = _CALL.match(self._left[:CALL_HEADER_CHARS_MAX])
        if found is not None:
            name = found[1].removesuffix(".call")
            self.has_failed = name not in self._allowed
        else:
            maybe = _MAYBE_CALL.match(self._left)
            self.has_failed = maybe is None or maybe.end() < len(self._left)

    def _finish(self, *, is_cut: bool) -> None:
        text = self._left.strip()
        if len(text) > CALL_CODE_CHARS_MAX:
            self.has_failed = True
            return
        try:
            calls = [_call(node) for node in _nodes(ast.parse(text, mode="eval").body)]
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            self.has_failed = True
            return
        self._take(len(self._left))
        for name, arguments in calls:
            self._begin(name)
            self._write(arguments)
            self._end()


def _nodes(parsed: ast.expr) -> list[ast.expr]:
    return parsed.elts if isinstance(parsed, ast.List | ast.Tuple) else [parsed]


def _call(node: ast.expr) -> tuple[str, str]:
    """Return a call's name and arguments; ValueError if it is no plain one."""
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        message = "no call by names of arguments"
        raise ValueError(message)
    arguments = {str(k.arg): ast.literal_eval(_JsonWords().visit(k.value)) for k in node.keywords}
    try:
        spelled = dumps(arguments, ensure_ascii=False)
    except TypeError as error:  # a set, bytes
        raise ValueError(str(error)) from None
    return ast.unparse(node.func).removesuffix(".call"), spelled


class _JsonWords(ast.NodeTransformer):
    """Models write JSON's words among Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def tool_names(tools: list[Any] | None) -> frozenset[str]:
    """List what may be called."""
    functions = (tool.get("function", tool) for tool in tools or () if isinstance(tool, dict))
    names = (each.get("name") for each in functions if isinstance(each, dict))
    return frozenset(name for name in names if isinstance(name, str))
