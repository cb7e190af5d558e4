"""Grammars of calls whose arguments stand between tags."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.dialect.call_grammar import GrammarOptions, one_of, repeat, rules_text
from node.dialect.call_reader import CallReader
from node.dialect.formats import CallFormat, TemplateSign
from node.dialect.string_schema import StringOption, string_options
from node.dialect.tag_calls import TagCallReader, TagFormat
from node.dialect.tool_schema import (
    DEFINITIONS,
    Argument,
    ToolSpec,
    argument_types,
    tool_arguments,
)
from node.grammar.expression import Expression, Json, Literal, Maybe, OneOf, Pattern, Until, row

_LINE = Maybe(Literal("\n"))
_NUMBER = Pattern("[1-9][0-9]?")
# JSON's types, as formats name them that state a value's type.
_TYPES: Final = {
    "array": "array",
    "boolean": "boolean",
    "integer": "number",
    "null": "null",
    "number": "number",
    "object": "object",
    "string": "string",
}
# Readers strip one line end at either edge, where a value may stand on lines of its own.
_NO_EDGES = "([^\n]((?s:.)*[^\n])?)?"


def tag_format(
    name: str,
    tags: TagFormat,
    signs: tuple[TemplateSign, ...] = (),
    *,
    inner_start: str = "",
    aliases: tuple[str, ...] = (),
) -> CallFormat:
    """Return the format of calls between these tags; some also begin at an `inner_start`."""

    def make(tools: list[Any] | None) -> CallReader:
        return TagCallReader(tools, tags)

    return CallFormat(
        name,
        tuple(filter(None, (tags.start, inner_start))),
        tags.end,
        make,
        inner_starts=(inner_start,) if inner_start else (),
        grammar=_TagGrammar(tags).build,
        signs=signs,
        aliases=aliases,
    )


@dataclass(frozen=True, slots=True)
class _TagGrammar:
    tags: TagFormat

    def build(self, tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
        tags, call = self.tags, one_of(tools, self._call)
        if tags.shares_section:
            calls = repeat(call, tags.between, options)
            sections = row(tags.start, _LINE, calls, _LINE, tags.end)
        else:
            section = row(tags.start, _LINE, call, _LINE, tags.end)
            sections = row(repeat(section, tags.between, options))
        return row(tags.before, sections, tags.after)

    def _call(self, tool: ToolSpec) -> Expression:
        tags = self.tags
        head, index, rest = (
            part.replace("NAME", tool.name) for part in tags.call.partition("INDEX")
        )
        match = tags.call_pattern.match(f"{head}{'1' if index else ''}{rest}\n")
        if match is None or match["name"] != tool.name:
            tool.refuse("this model's format does not allow its name")
        arguments: list[Expression] = []
        for argument in tool_arguments(tool):
            line = row(_LINE, self._argument(tool, argument))
            arguments.append(line if argument.is_required else Maybe(line))
        end = (_LINE, tags.call_end) if tags.call_end else ()
        number = (_NUMBER, rest) if index else ()
        return row(head, *number, *arguments, *end)

    @property
    def _argument_end(self) -> str:
        return self.tags.line_end + self.tags.argument_end

    def _argument(self, tool: ToolSpec, argument: Argument) -> Expression:
        types = argument_types(tool.parameters, argument.key)
        tags = self.tags
        if any("TYPE" in part for part in tags.argument):
            stated = sorted(types & _TYPES.keys() or _TYPES)
            return OneOf(tuple(self._typed(tool, argument, type_) for type_ in stated))
        is_text = types == {"string"} or (not types and not tags.guesses)
        head = self._head(tool, argument, (is_text and tags.text_argument) or tags.argument)
        if is_text:
            return row(head, self._text(tool, argument))
        value = Json(_readable(argument.schema, types), tool.is_strict)
        return row(head, value, self._argument_end)

    def _typed(self, tool: ToolSpec, argument: Argument, type_: str) -> Expression:
        parts = tuple(part.replace("TYPE", _TYPES[type_]) for part in self.tags.argument)
        head = self._head(tool, argument, parts)
        if type_ == "string":
            return row(head, self._text(tool, argument))
        value = Json(_of_types(argument.schema, [type_]), tool.is_strict)
        return row(head, value, self._argument_end)

    def _head(self, tool: ToolSpec, argument: Argument, parts: Sequence[str]) -> Expression:
        first, *others = (part.replace("KEY", argument.key) for part in parts)
        text = "".join([first, *others]).rstrip("\n")
        match = self.tags.argument_pattern.match(f"{text}x")
        if match is None or match["key"] != argument.key or match.end() != len(text):
            tool.refuse(f"this model's format does not allow the name {argument.key[:100]!r}")
        return row(first, *(row(_LINE, part) for part in others))

    def _text(self, tool: ToolSpec, argument: Argument) -> Expression:
        """Return a plain text, which cannot contain the tag that ends it."""
        tags = self.tags
        if tool.rules:  # none of their terminals may match the tag's first character or a line end
            forbidden = f"{tags.argument_end[0]}{tags.quoted_chars}"
            forbidden += "\n" if tags.has_lines else ""
            return rules_text(tool, self._argument_end, forbidden)
        options = [
            expression
            for option in string_options(tool, argument.schema)
            for expression in self._options(option)
        ]
        if not options:
            tool.refuse(f"its format can write no value that fits {argument.key[:100]!r}")
        return OneOf(tuple(options))

    def _options(self, option: StringOption) -> Iterator[Expression]:
        tags, end = self.tags, self._argument_end
        if tags.quotes is not None:
            yield from self._quoted(option, *tags.quotes)
            return
        strips_edges = tags.has_lines and not tags.line_end
        if option.constant is None:
            edges = (_NO_EDGES,) if strips_edges else ()
            yield Until(end, (tags.argument_end,), option.patterns + edges)
            return
        is_changed = strips_edges and option.constant.strip("\n") != option.constant
        if not is_changed and tags.argument_end not in option.constant:
            yield row(option.constant, end)

    def _quoted(self, option: StringOption, opening: str, closing: str) -> Iterator[Expression]:
        """Return a text plain and in quotes, as far as either can hold it."""
        end, quoted_chars = self._argument_end, tuple(self.tags.quoted_chars)
        constant = option.constant
        if constant is None:
            yield Until(end, quoted_chars, option.patterns)
            yield row(opening, Until(closing + end, (closing,), option.patterns))
        elif not any(char in constant for char in quoted_chars):
            yield row(constant, end)
        elif closing not in constant:
            yield row(opening, constant, closing, end)


def _readable(schema: dict[str, Any], types: set[str]) -> dict[str, Any]:
    """Leave out types that would be read as a text: a number is, where a text is allowed."""
    if "string" not in types or types <= {"string", "null"}:
        return schema
    return _of_types(schema, sorted(types & {"string", "null"}))


def _of_types(schema: dict[str, Any], types: list[str]) -> dict[str, Any]:
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    return {**definitions, "allOf": [schema, {"type": types}]}
