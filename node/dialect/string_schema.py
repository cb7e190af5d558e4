"""Regular expressions for string arguments that are written unquoted, from their schemas."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fabric.turn.schema_keywords import ANNOTATIONS
from node.dialect.tool_schema import ToolSpec, resolve, value_types
from node.limits import CALL_TEXT_COUNTED_CHARS_MAX

_DATE: Final = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# Each matches only valid texts, though not all: enough for what models write.
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]{1,4}D(T[0-9]{1,6}[HMS])?|T[0-9]{1,6}[HMS])",
    "email": rf"[0-9A-Za-z_+-]+(\.[0-9A-Za-z_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": "[0-9a-f]{1,4}(:[0-9a-f]{1,4}){7}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]*://[0-9A-Za-z._~:/?#@!$&'()*+,;=%-]+",
}
_KNOWN: Final = {"type", "enum", "const", "pattern", "format", "minLength", "maxLength"}
_COMBINED: Final = ("anyOf", "oneOf", "allOf")
_ANYTHING: Final = "(?s:.*)"
_ENDS: Final = re.compile(r"(?<!\\)(\\\\)*\$$")


@dataclass(frozen=True, slots=True)
class StringOption:
    """Alternative of a string: one constant, or any text that all patterns match."""

    constant: str | None = None
    patterns: tuple[str, ...] = ()


def string_options(tool: ToolSpec, schema: Any) -> list[StringOption]:
    """List a string's alternatives.

    Raise RejectedError where a strict tool's schema constrains more than can be enforced.
    """
    return list(_options(tool, schema, tool.parameters, set()))


def _options(
    tool: ToolSpec, schema: Any, root: Mapping[str, Any], seen: set[str]
) -> Iterator[StringOption]:
    schema = resolve(schema, root, seen)
    combined = [name for name in _COMBINED if isinstance(schema.get(name), list)]
    unknown = schema.keys() - _KNOWN - ANNOTATIONS - {"$ref", *combined}
    if tool.is_strict and (unknown or len(combined) > 1):
        tool.refuse(f"{min(unknown, default='anyOf')!r} of a string is not enforced in its format")
    patterns = tuple(_patterns(tool, schema))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        yield from (StringOption(value) for value in values if isinstance(value, str))
    elif not combined:
        yield StringOption(None, patterns)
    elif combined[0] == "allOf":
        parts = [list(_options(tool, part, root, seen)) for part in schema["allOf"]]
        fixed = next((part for part in parts if any(o.constant is not None for o in part)), None)
        if fixed is not None:
            yield from fixed
        else:
            inner = tuple(p for part in parts for option in part for p in option.patterns)
            yield StringOption(None, patterns + inner)
    else:
        for part in schema[combined[0]]:
            if "string" in (value_types(part, root) or {"string"}):
                for option in _options(tool, part, root, seen):
                    yield StringOption(option.constant, option.patterns + patterns)


def _patterns(tool: ToolSpec, schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = (_length(tool, schema, name) for name in ("minLength", "maxLength"))
    if least is not None or most is not None:
        yield f"(?s:.){{{least or 0},{'' if most is None else most}}}"
    if isinstance(schema.get("pattern"), str):
        yield _whole_pattern(tool, schema["pattern"])
    format_ = schema.get("format")
    if isinstance(format_, str):
        if format_ in _FORMATS:
            yield _FORMATS[format_]
        elif tool.is_strict:
            tool.refuse(f"the string format {format_[:100]!r} is not supported")


def _length(tool: ToolSpec, schema: Mapping[str, Any], name: str) -> int | None:
    """Return a length limit, or None if it is too large to count, as for whole files."""
    length = schema.get(name)
    if not isinstance(length, int):
        return None
    if length <= CALL_TEXT_COUNTED_CHARS_MAX:
        return length
    if tool.is_strict:
        tool.refuse(f"{name!r} of a string must be at most {CALL_TEXT_COUNTED_CHARS_MAX}")
    return None


def _whole_pattern(tool: ToolSpec, pattern: str) -> str:
    """Turn a pattern that may match anywhere into one that matches the whole text."""
    branches = []
    for branch in _branches(pattern):
        is_first, is_last = branch.startswith("^"), _ENDS.search(branch) is not None
        inner = branch[int(is_first) : len(branch) - int(is_last)]
        if any(part in ("^", "$", r"\b", r"\B") for part in _tokens(inner)):
            if tool.is_strict:
                tool.refuse(f"the pattern {pattern[:100]!r} has anchors within it")
            return _ANYTHING
        before, after = ("" if is_edge else _ANYTHING for is_edge in (is_first, is_last))
        branches.append(f"{before}(?:{inner}){after}")
    return "|".join(branches)


def _branches(pattern: str) -> list[str]:
    """Split a pattern at the bars outside of all brackets."""
    branches, depth = [""], 0
    for part in _tokens(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            branches.append("")
        else:
            branches[-1] += part
    return branches


def _tokens(pattern: str) -> list[str]:
    """Split a pattern into escapes, character classes and single characters."""
    return re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
