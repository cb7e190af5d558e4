"""Texts that stand between tags as they are: what a schema says of them, as regular expressions."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from node.dialect.offered_tool import OfferedTool
from node.dialect.schema_parts import REMARKS, kinds_of, resolved
from node.limits import CALL_TEXT_COUNTED_CHARS_MAX

_DATE: Final = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = "[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# A part of what each format allows: nothing else fits it, and a model can say what it needs.
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


@dataclass(frozen=True, slots=True)
class RawText:
    """One of what a text may be: these words, or what all patterns match."""

    words: str | None = None
    patterns: tuple[str, ...] = ()


def raw_texts(tool: OfferedTool, schema: Any) -> list[RawText]:
    """Say what a text may be; raise RejectedError where a strict tool's schema says more."""
    return list(_texts(tool, schema, tool.parameters, set()))


def _texts(
    tool: OfferedTool, schema: Any, root: Mapping[str, Any], seen: set[str]
) -> Iterator[RawText]:
    schema = resolved(schema, root, seen)
    combined = [name for name in _COMBINED if isinstance(schema.get(name), list)]
    unknown = schema.keys() - _KNOWN - REMARKS - {"$ref", *combined}
    if tool.is_strict and (unknown or len(combined) > 1):
        tool.refuse(f"{min(unknown, default='anyOf')!r} of a text is not enforced in its format")
    own = tuple(_patterns(tool, schema))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        yield from (RawText(value) for value in values if isinstance(value, str))
    elif not combined:
        yield RawText(None, own)
    elif combined[0] == "allOf":
        found = [list(_texts(tool, part, root, seen)) for part in schema["allOf"]]
        fixed = next((texts for texts in found if any(t.words is not None for t in texts)), None)
        if fixed is not None:
            yield from fixed
        else:
            yield RawText(
                None, own + tuple(p for texts in found for t in texts for p in t.patterns)
            )
    else:
        for option in schema[combined[0]]:
            if "string" in (kinds_of(option, root) or {"string"}):
                for text in _texts(tool, option, root, seen):
                    yield RawText(text.words, text.patterns + own)


def _patterns(tool: OfferedTool, schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = (_counted(tool, schema, name) for name in ("minLength", "maxLength"))
    if least is not None or most is not None:
        yield f"(?s:.){{{least or 0},{'' if most is None else most}}}"
    if isinstance(schema.get("pattern"), str):
        yield _whole(tool, schema["pattern"])
    form = schema.get("format")
    if isinstance(form, str):
        if form in _FORMATS:
            yield _FORMATS[form]
        elif tool.is_strict:
            tool.refuse(f"the format {form[:100]!r} of a text is not known")


def _counted(tool: OfferedTool, schema: Mapping[str, Any], name: str) -> int | None:
    """Return a length, unless it is more than is counted: a text of a file must not fail by it."""
    length = schema.get(name)
    if not isinstance(length, int):
        return None
    if length <= CALL_TEXT_COUNTED_CHARS_MAX:
        return length
    if tool.is_strict:
        tool.refuse(f"{name!r} of a text is over {CALL_TEXT_COUNTED_CHARS_MAX} in its format")
    return None


def _whole(tool: OfferedTool, pattern: str) -> str:
    """Turn a pattern that is to be found somewhere into one of the whole text."""
    made = []
    for branch in _branches(pattern):
        begins, ends = branch.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", branch) is not None
        inner = branch[int(begins) : len(branch) - int(ends)]
        if any(_is_anchor(part) for part in _scanned(inner)):
            if tool.is_strict:
                tool.refuse(f"the pattern {pattern[:100]!r} has anchors within it")
            return _ANYTHING
        made.append(("" if begins else _ANYTHING) + f"(?:{inner})" + ("" if ends else _ANYTHING))
    return "|".join(made)


def _branches(pattern: str) -> list[str]:
    """Split a pattern at the bars that stand in no brackets."""
    made, depth = [""], 0
    for part in _scanned(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            made.append("")
        else:
            made[-1] += part
    return made


def _is_anchor(part: str) -> bool:
    return part in ("^", "$", r"\b", r"\B")


def _scanned(pattern: str) -> list[str]:
    """Cut a pattern into escapes, classes of characters, and single characters."""
    return re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
