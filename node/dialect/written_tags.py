"""Grammars of calls whose arguments stand between tags, one by one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from node.dialect.offered_tool import OfferedTool
from node.dialect.raw_text import RawText, raw_texts
from node.dialect.schema_parts import DEFINITIONS, Argument, argument_kinds, parameters_of
from node.dialect.tag_calls import Tags
from node.dialect.writing import BLANK_LINES, Style, Write, one_of, repeated
from node.grammar.expression import Expression, Json, Literal, Maybe, OneOf, Until, row

_LINE = Maybe(Literal("\n"))
# What it is read without, where a value may stand on lines of its own.
_NO_EDGES = "([^\n]((?s:.)*[^\n])?)?"


@dataclass(frozen=True, slots=True)
class TagWords:
    """What stands around a call and each of its arguments; NAME and KEY are put into it."""

    start: str
    call: str
    argument: tuple[str, ...]  # a new line may stand between them
    argument_end: str
    call_end: str
    end: str
    text_argument: tuple[str, ...] = ()  # of a text, where it is told from other values
    shares_section: bool = False  # of several calls


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
            calls = repeated(call, "\n", style)
            return row(BLANK_LINES, words.start, lines, calls, lines, words.end)
        section = row(words.start, lines, call, lines, words.end)
        return row(BLANK_LINES, repeated(section, "\n", style))

    def _call(self, tool: OfferedTool) -> Expression:
        words, lines = self.words, _LINE
        head = words.call.replace("NAME", tool.name)
        found = self.tags.call.match(f"{head}\n")
        if found is None or found["name"] != tool.name:
            tool.refuse("this model's format does not take its name")
        inner: list[Expression] = []
        for each in parameters_of(tool):
            argument = row(lines, self._argument(tool, each))
            inner.append(argument if each.is_required else Maybe(argument))
        end = (lines, words.call_end) if words.call_end else ()
        return row(head, *inner, *end)

    def _argument(self, tool: OfferedTool, each: Argument) -> Expression:
        kinds = argument_kinds(tool.parameters, each.key)
        is_text = kinds == {"string"} or (not kinds and not self.tags.guesses)
        words = self.words
        parts = (is_text and words.text_argument) or words.argument
        first, *others = (part.replace("KEY", each.key) for part in parts)
        text = "".join([first, *others])
        found = self.tags.argument.match(text)
        if found is None or found["key"] != each.key or found.end() != len(text.rstrip("\n")):
            tool.refuse(f"this model's format does not take the name {each.key[:100]!r}")
        head = row(first, *(row(_LINE, part) for part in others))
        if is_text:
            return row(head, self._text(tool, each))
        return row(head, Json(_readable(each.schema, kinds), tool.is_strict), words.argument_end)

    def _text(self, tool: OfferedTool, each: Argument) -> Expression:
        """Write a text as it stands: it cannot have the tag in it that ends it."""
        options = [
            option
            for text in raw_texts(tool, each.schema)
            if (option := self._option(text)) is not None
        ]
        if not options:
            tool.refuse(f"nothing that fits {each.key[:100]!r} can be written in its format")
        return OneOf(tuple(options))

    def _option(self, text: RawText) -> Expression | None:
        end, tag = self.words.argument_end, self.tags.argument_end
        has_edges = self.tags.has_lines and not end.startswith("\n")
        if text.words is None:
            edges = (_NO_EDGES,) if has_edges else ()
            return Until(end, (tag,), text.patterns + edges)
        is_cut = has_edges and text.words.strip("\n") != text.words
        return None if tag in text.words or is_cut else row(text.words, end)


def _readable(schema: dict[str, Any], kinds: set[str]) -> dict[str, Any]:
    """Leave out what would be read as a text: a number, where it may be one, is."""
    if "string" not in kinds or kinds <= {"string", "null"}:
        return schema
    kept = sorted(kinds & {"string", "null"})
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    return {**definitions, "allOf": [schema, {"type": kept}]}
