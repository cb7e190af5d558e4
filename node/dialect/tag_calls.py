"""Reader and grammar of calls whose arguments stand between tags, each as plain text."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import JSONDecodeError, dumps, loads
from typing import Any, Final

from fabric.turn.schema_keywords import DEFINITIONS
from node.dialect.call_grammar import BLANK_LINES, GrammarOptions, one_of, repeat, rules_text
from node.dialect.call_reader import CallReader
from node.dialect.formats import CallFormat, TemplateSign
from node.dialect.json_calls import JsonScanner
from node.dialect.string_schema import StringOption, string_options
from node.dialect.text_filters import held_chars
from node.dialect.tool_schema import (
    Argument,
    ToolSpec,
    argument_types,
    tool_arguments,
    tool_parameters,
)
from node.grammar.expression import Expression, Json, Literal, Maybe, OneOf, Pattern, Until, row
from node.limits import CALL_CODE_CHARS_MAX, CALL_HEADER_CHARS_MAX


@dataclass(frozen=True, slots=True)
class TagFormat:
    """Tags around a section of calls, a call and an argument: as written, and as patterns to read.

    Written tags have NAME and KEY in place of the names, and some the call's INDEX and the value's
    TYPE; an argument's end may have its KEY, too. Patterns name groups `name` and `key`, and some
    `is_text` (states whether the value is a text) and `opening` (of a quoted value). An argument
    without a key is all arguments in JSON.
    """

    start: str
    call: str
    call_pattern: re.Pattern[str]
    argument: tuple[str, ...]  # a line end may stand between them
    argument_pattern: re.Pattern[str]
    argument_end: str
    call_end: str  # "": the section's end
    end: str
    # What is read:
    has_lines: bool = True  # a value may stand on lines of its own
    guesses: bool = False  # a value's type, where the tool's schema does not say
    has_entities: bool = False  # `&quot;` and `&amp;` in names
    loose_end: str = ""  # an argument's end, if `after_loose_end` follows
    after_loose_end: str = ""
    other_ends: Mapping[str, str] = field(default_factory=dict)  # ends of values with an `opening`
    # What is written:
    written_call_end: str = ""  # written in place of `call_end`, if longer
    line_end: str = ""  # written before an argument's end
    text_argument: tuple[str, ...] = ()  # tags of a text, if they differ
    shares_section: bool = False  # one section holds all calls
    between: str = "\n"  # calls, or sections
    quotes: tuple[str, str] | None = None  # around a text that cannot stand plain
    quoted_chars: str = ""  # characters that a plain text cannot have
    before: Expression = BLANK_LINES
    after: Expression = field(default_factory=row)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TagFormat":
        return self  # constant: the copies of a reader share it


class TagCallReader(CallReader):
    """Reader that streams texts as they arrive, and other values once their end tag arrives."""

    def __init__(self, tools: list[Any] | None, tags: TagFormat) -> None:
        super().__init__(tools)
        self._tags = tags
        self._name = ""
        self._key: str | None = None  # key of the current argument
        self._is_text = False
        self._states_type = False  # whether the tag states the value's type
        self._missing = "{}"  # completes the arguments' JSON if the call ends here
        self._is_first_text = False  # nothing of the value has been read
        self._value = ""  # value so far, if it is not a text
        self._end_tag = self._loose_end = ""  # end tags of the value

    @property
    def is_in_value(self) -> bool:
        return self._key is not None

    def _read(self) -> None:
        while self._unread and not self.has_failed:
            before = len(self._unread)
            if self._key is not None:
                self._read_value()
            elif self._arguments is not None:
                self._read_inside()
            else:
                self._read_call()
            if len(self._unread) == before:
                return

    @property
    def is_complete(self) -> bool:
        return super().is_complete and not self._unread.strip()

    def _finish(self, *, is_cut: bool) -> None:
        if self._tags.call_end or is_cut:
            return
        if self._arguments is None:
            self._unread += "<"  # the section's end also ends a name without arguments
            self._read()
        if self._arguments is not None and self._key is None:
            self._close_call()
            self._take(len(self._unread))

    def _read_call(self) -> None:
        call = self._tags.call_pattern.search(self._unread)
        if call is None:
            self.has_failed = self.calls_count == 0 and len(self._unread) > CALL_HEADER_CHARS_MAX
            return
        self._take(call.end())
        self._name, self._missing = self._unescape(call["name"]), "{}"
        self._start_call(self._name)

    def _read_inside(self) -> None:
        argument = self._tags.argument_pattern.search(self._unread)
        end = self._unread.find(self._tags.call_end) if self._tags.call_end else -1
        if end >= 0 and (argument is None or end < argument.start()):
            self._take(end + len(self._tags.call_end))
            self._close_call()
        elif argument is not None:
            self._take(argument.end())
            self._start_argument(argument.groupdict())
        else:
            self.has_failed = len(self._unread) > CALL_HEADER_CHARS_MAX

    def _start_argument(self, groups: Mapping[str, str | None]) -> None:
        key, is_text, opening = groups["key"], groups.get("is_text"), groups.get("opening")
        self._key, self._value = self._unescape(key or ""), ""
        end = self._tags.other_ends.get(opening or "", self._tags.argument_end)
        self._end_tag = end.replace("KEY", self._key)
        self._loose_end = self._tags.loose_end.replace("KEY", self._key)
        if key is None:
            self._is_text, self._missing = False, ""
            return
        types = self._types(self._key)
        self._states_type = is_text is not None
        if self._states_type:
            self._is_text = is_text in ("true", "string")
        else:
            self._is_text = types == {"string"} or (not types and not self._tags.guesses)
        first = "{" if self._missing == "{}" else ", "
        self._add_arguments(first + dumps(self._key, ensure_ascii=False) + ": ")
        if self._is_text:
            self._add_arguments('"')
        self._missing = "}"
        self._is_first_text = True

    def _unescape(self, name: str) -> str:
        if not self._tags.has_entities:
            return name
        return name.replace("&quot;", '"').replace("&amp;", "&")

    def _read_value(self) -> None:
        if self._tags.has_lines and self._is_first_text:
            self._is_first_text = False
            self._take(self._unread.startswith("\n"))
        at, size = self._value_end()
        if at < 0:
            ends = [self._end_tag, *([f"\n{self._end_tag}"] if self._tags.has_lines else [])]
            if self._loose_end:
                ends.append(self._loose_end + self._tags.after_loose_end)
            held = held_chars(self._unread, tuple(ends), max(map(len, ends)))
            self._add_value(self._take(len(self._unread) - held))
            return
        value = self._take(at)
        self._take(size)
        self._add_value(value.removesuffix("\n") if self._tags.has_lines else value)
        self._add_arguments('"' if self._is_text else self._json_value())
        self._key = None

    def _value_end(self) -> tuple[int, int]:
        """Return where the end tag is, and its size; a string of enforced JSON may contain it."""
        at = self._unread.find(self._end_tag)
        while at >= 0 and self.is_enforced and not self._is_text:
            scanner = JsonScanner()
            scanner.feed(self._value + self._unread[:at])
            if not scanner.is_in_string:
                break
            at = self._unread.find(self._end_tag, at + 1)
        if self._loose_end and not self.is_enforced:
            loose = self._unread.find(self._loose_end + self._tags.after_loose_end)
            if loose >= 0 and (at < 0 or loose < at):
                return loose, len(self._loose_end)
        return at, len(self._end_tag)

    def _add_value(self, text: str) -> None:
        if self._is_text:
            self._add_arguments(dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _close_call(self) -> None:
        self._add_arguments(self._missing)
        self._end_call()

    def _json_value(self) -> str:
        assert self._key is not None, "within an argument"
        types = self._types(self._key)
        may_be_text = types <= {"string", "null"} if self._states_type else True
        return json_value(self._value, types if may_be_text else types - {"string"})

    def _types(self, key: str) -> set[str]:
        """Return the types that the tool's schema allows; none if it gives none."""
        return argument_types(tool_parameters(self.tools, self._name), key)


def json_value(spelled: str, types: set[str]) -> str:
    """Return a value in JSON: parsed as JSON or Python, or else as a text."""
    encoded = None
    try:
        value, encoded = loads(spelled.strip(), parse_constant=_reject_constant), spelled.strip()
    except (ValueError, RecursionError):
        value = _parse_loosely(spelled.strip(), spelled)
    is_null = value is None and "null" in types
    if "string" in types and not isinstance(value, str) and not is_null:
        value, encoded = spelled, None  # a number where the schema wants a text
    return dumps(value, ensure_ascii=False) if encoded is None else encoded


def _reject_constant(word: str) -> Any:
    raise ValueError(word)


def _parse_loosely(text: str, otherwise: str) -> Any:
    """Parse JSON with raw line ends in its strings, or a literal of Python."""
    try:
        return loads(text, strict=False)
    except (JSONDecodeError, RecursionError):
        pass
    if len(text) > CALL_CODE_CHARS_MAX:
        return otherwise
    try:
        value = ast.literal_eval(text)
        dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return otherwise
    return value


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
    reader: Callable[[list[Any] | None, TagFormat], CallReader] = TagCallReader,
) -> CallFormat:
    """Return the format of calls between these tags; some also begin at an `inner_start`."""

    def make(tools: list[Any] | None) -> CallReader:
        return reader(tools, tags)

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
        match = tags.call_pattern.match(f"{head}{'1' if index else ''}{rest}<")
        if match is None or match["name"] != tool.name:
            tool.refuse("this model's format does not allow its name")
        arguments: list[Expression] = []
        for argument in tool_arguments(tool):
            line = row(_LINE, self._argument(tool, argument))
            arguments.append(line if argument.is_required else Maybe(line))
        end = (_LINE, tags.written_call_end or tags.call_end) if tags.call_end else ()
        number = (_NUMBER, rest) if index else ()
        return row(head, *number, *arguments, *end)

    def _end(self, argument: Argument) -> str:
        return self.tags.line_end + self.tags.argument_end.replace("KEY", argument.key)

    def _argument(self, tool: ToolSpec, argument: Argument) -> Expression:
        types = argument_types(tool.parameters, argument.key)
        tags = self.tags
        if any("TYPE" in part for part in tags.argument):
            stated = sorted(types & _TYPES.keys() or _TYPES)
            return OneOf(tuple(self._typed_argument(tool, argument, type_) for type_ in stated))
        is_text = types == {"string"} or (not types and not tags.guesses)
        head = self._head(tool, argument, (is_text and tags.text_argument) or tags.argument)
        if is_text:
            return row(head, self._text(tool, argument))
        value = Json(_readable(argument.schema, types), tool.is_strict)
        return row(head, value, self._end(argument))

    def _typed_argument(self, tool: ToolSpec, argument: Argument, type_: str) -> Expression:
        parts = tuple(part.replace("TYPE", _TYPES[type_]) for part in self.tags.argument)
        head = self._head(tool, argument, parts)
        if type_ == "string":
            return row(head, self._text(tool, argument))
        value = Json(_of_types(argument.schema, [type_]), tool.is_strict)
        return row(head, value, self._end(argument))

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
            return rules_text(tool, self._end(argument), forbidden)
        options = [
            expression
            for option in string_options(tool, argument.schema)
            for expression in self._options(option, argument)
        ]
        if not options:
            tool.refuse(f"its format can write no value that fits {argument.key[:100]!r}")
        return OneOf(tuple(options))

    def _options(self, option: StringOption, argument: Argument) -> Iterator[Expression]:
        tags, end = self.tags, self._end(argument)
        tag = tags.argument_end.replace("KEY", argument.key)
        if tags.quotes is not None:
            yield from self._quoted_options(option, end, *tags.quotes)
            return
        strips_edges = tags.has_lines and not tags.line_end
        if option.constant is None:
            edges = (_NO_EDGES,) if strips_edges else ()
            loose_tag = tags.loose_end.replace("KEY", argument.key)
            ends = (tag, loose_tag) if loose_tag else (tag,)
            yield Until(end, ends, option.patterns + edges)
            return
        is_changed = strips_edges and option.constant.strip("\n") != option.constant
        if not is_changed and tag not in option.constant:
            yield row(option.constant, end)

    def _quoted_options(
        self, option: StringOption, end: str, opening: str, closing: str
    ) -> Iterator[Expression]:
        """Return a text plain and in quotes, as far as either can hold it."""
        quoted_chars = tuple(self.tags.quoted_chars)
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
