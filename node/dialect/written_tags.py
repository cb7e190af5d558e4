"""Grammars of calls whose arguments stand between tags, one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.dialect.offered_tool import OfferedTool
from node.dialect.raw_text import RawText, raw_texts
from node.dialect.schema_parts import DEFINITIONS, Argument, argument_kinds, parameters_of
from node.dialect.tag_calls import Tags
from node.dialect.writing import BLANK_LINES, Style, Write, one_of, raw_rules, repeated
from node.grammar.expression import (
    Expression,
    Json,
    Literal,
    Maybe,
    OneOf,
    Pattern,
    Until,
    row,
)

_NOTHING = row()
_LINE = Maybe(Literal("\n"))
_NUMBER = Pattern("[1-9][0-9]?")
# What JSON has, as formats call it that tell of what type a value is.
_TYPES: Final = {
    "array": "array",
    "boolean": "boolean",
    "integer": "number",
    "null": "null",
    "number": "number",
    "object": "object",
    "string": "string",
}
# What it is read without, where a value may stand on lines of its own.
_NO_EDGES = "([^\n]((?s:.)*[^\n])?)?"


@dataclass(frozen=True, slots=True)
class TagWords:
    """What stands around a call and each of its arguments.

    NAME and KEY are put into it, and where there are some, the call's INDEX and the value's TYPE.
    """

    start: str
    call: str
    argument: tuple[str, ...]  # a new line may stand between them
    argument_end: str
    call_end: str
    end: str
    text_argument: tuple[str, ...] = ()  # of a text, where it is told from other values
    shares_section: bool = False  # of several calls
    between: str = "\n"  # two calls, or sections
    quotes: tuple[str, str] | None = None  # around a text that is more than a plain one
    unplain: str = ""  # characters that a text has only in them
    before: Expression = BLANK_LINES
    behind: Expression = _NOTHING


def write_tags(tags: Tags, words: TagWords) -> Write:
    """Return how calls are written that `tags` read."""
    return _TagWriter(tags, words).write


@dataclass(frozen=True, slots=True)
class _TagWriter:
    tags: Tags
    words: TagWords

    def write(self, tools: Sequence[OfferedTool], style: Style) -> Expression:
        words, lines = self.words, _LINE
        call = one_of(tools, self._call)
        if words.shares_section:
            calls = repeated(call, words.between, style)
            all_calls = row(words.start, lines, calls, lines, words.end)
        else:
            section = row(words.start, lines, call, lines, words.end)
            all_calls = row(repeated(section, words.between, style))
        return row(words.before, all_calls, words.behind)

    def _call(self, tool: OfferedTool) -> Expression:
        words, lines = self.words, _LINE
        head, index, behind = (
            part.replace("NAME", tool.name) for part in words.call.partition("INDEX")
        )
        found = self.tags.call.match(f"{head}{'1' if index else ''}{behind}\n")
        if found is None or found["name"] != tool.name:
            tool.refuse("this model's format does not take its name")
        inner: list[Expression] = []
        for each in parameters_of(tool):
            argument = row(lines, self._argument(tool, each))
            inner.append(argument if each.is_required else Maybe(argument))
        end = (lines, words.call_end) if words.call_end else ()
        number = (_NUMBER, behind) if index else ()
        return row(head, *number, *inner, *end)

    def _argument(self, tool: OfferedTool, each: Argument) -> Expression:
        kinds = argument_kinds(tool.parameters, each.key)
        words = self.words
        if any("TYPE" in part for part in words.argument):
            told = sorted(kinds & _TYPES.keys() or _TYPES)
            return OneOf(tuple(self._typed(tool, each, kind) for kind in told))
        is_text = kinds == {"string"} or (not kinds and not self.tags.guesses)
        head = self._head(tool, each, (is_text and words.text_argument) or words.argument)
        if is_text:
            return row(head, self._text(tool, each))
        return row(head, Json(_readable(each.schema, kinds), tool.is_strict), words.argument_end)

    def _typed(self, tool: OfferedTool, each: Argument, kind: str) -> Expression:
        parts = tuple(part.replace("TYPE", _TYPES[kind]) for part in self.words.argument)
        head = self._head(tool, each, parts)
        if kind == "string":
            return row(head, self._text(tool, each))
        value = Json(_of_kinds(each.schema, [kind]), tool.is_strict)
        return row(head, value, self.words.argument_end)

    def _head(self, tool: OfferedTool, each: Argument, parts: Sequence[str]) -> Expression:
        first, *others = (part.replace("KEY", each.key) for part in parts)
        text = "".join([first, *others]).rstrip("\n")
        found = self.tags.argument.match(f"{text}x")
        if found is None or found["key"] != each.key or found.end() != len(text):
            tool.refuse(f"this model's format does not take the name {each.key[:100]!r}")
        return row(first, *(row(_LINE, part) for part in others))

    def _text(self, tool: OfferedTool, each: Argument) -> Expression:
        """Write a text as it stands: it cannot have the tag in it that ends it."""
        if tool.rules:  # no terminal of theirs may take what begins the tag, or stands beside it
            never = f"{self.tags.argument_end[0]}{self.words.unplain}"
            never += "\n" if self.tags.has_lines else ""
            return raw_rules(tool, self.words.argument_end, never)
        options = [
            option for text in raw_texts(tool, each.schema) for option in self._options(text)
        ]
        if not options:
            tool.refuse(f"nothing that fits {each.key[:100]!r} can be written in its format")
        return OneOf(tuple(options))

    def _options(self, text: RawText) -> Iterator[Expression]:
        end, tag = self.words.argument_end, self.tags.argument_end
        if self.words.quotes is not None:
            yield from self._quoted(text, *self.words.quotes)
            return
        has_edges = self.tags.has_lines and not end.startswith("\n")
        if text.words is None:
            edges = (_NO_EDGES,) if has_edges else ()
            yield Until(end, (tag,), text.patterns + edges)
            return
        is_cut = has_edges and text.words.strip("\n") != text.words
        if not is_cut and tag not in text.words:
            yield row(text.words, end)

    def _quoted(self, text: RawText, opening: str, closing: str) -> Iterator[Expression]:
        """Write it plain, or where that cannot be, or need not, in quotes."""
        end, unplain = self.words.argument_end, tuple(self.words.unplain)
        if text.words is None:
            yield Until(end, unplain, text.patterns)
            yield row(opening, Until(closing + end, (closing,), text.patterns))
        elif not any(sign in text.words for sign in unplain):
            yield row(text.words, end)
        elif closing not in text.words:
            yield row(opening, text.words, closing, end)


def _readable(schema: dict[str, Any], kinds: set[str]) -> dict[str, Any]:
    """Leave out what would be read as a text: a number, where it may be one, is."""
    if "string" not in kinds or kinds <= {"string", "null"}:
        return schema
    return _of_kinds(schema, sorted(kinds & {"string", "null"}))


def _of_kinds(schema: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    return {**definitions, "allOf": [schema, {"type": kinds}]}
