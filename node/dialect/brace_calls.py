"""Calls as `call:NAME{key:value}`: only texts are quoted, by marks of their own."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps, loads
from typing import Any, Final

from fabric.turn.schema_keywords import ANNOTATIONS
from node.dialect.call_grammar import (
    BLANK_LINES,
    GrammarOptions,
    one_of,
    repeat,
    require_plain_name,
    rules_text,
)
from node.dialect.call_reader import CallReader
from node.dialect.formats import CallFormat, TemplateSign
from node.dialect.string_schema import string_options
from node.dialect.text_filters import held_chars
from node.dialect.tool_schema import ToolSpec, resolve, value_types
from node.grammar.expression import Expression, Json, Many, Maybe, OneOf, Until, row
from node.limits import CALL_HEADER_CHARS_MAX, CALL_ITEMS_COUNTED_MAX, CALL_VALUES_DEPTH_MAX

_HEAD = re.compile(r"call:(?P<name>[\w.\-]+)\s*(?=\{)")
_WORD = re.compile(r"[^,:{}\[\]]+")
_PYTHON_CONSTANTS = {"None": "null", "True": "true", "False": "false"}  # printed by templates
_KNOWN: Final = {"type", "properties", "required", "additionalProperties"}


def brace_format(
    name: str, start: str, quote: str, end: str, signs: tuple[TemplateSign, ...]
) -> CallFormat:
    """Return the format of calls between marks, with `quote` around texts."""

    def make(tools: list[Any] | None) -> CallReader:
        return BraceCallReader(tools, quote)

    grammar = _BraceGrammar(start, quote, end).build
    return CallFormat(name, (start,), end, make, grammar=grammar, signs=signs)


class BraceCallReader(CallReader):
    """Reader that streams arguments as JSON; `quote` stands around texts."""

    def __init__(self, tools: list[Any] | None, quote: str) -> None:
        super().__init__(tools)
        self._quote = quote
        self._is_in_text = False
        self._brackets = ""  # open brackets, the innermost last
        self._is_key = False  # the next word is a key

    @property
    def is_in_value(self) -> bool:
        return self._is_in_text

    def _read(self) -> None:
        while self._unread and not self.has_failed:
            before = len(self._unread)
            if self._arguments is None:
                self._read_head()
            elif self._is_in_text:
                self._read_text()
            else:
                self._read_part()
            if len(self._unread) == before:
                return

    def _read_head(self) -> None:
        head = _HEAD.search(self._unread)
        if head is not None:
            self._take(head.end())
            self._start_call(head["name"])
        elif not self.calls_count:
            self.has_failed = len(self._unread) > CALL_HEADER_CHARS_MAX

    def _read_text(self) -> None:
        at = self._unread.find(self._quote)
        size = len(self._quote)
        self._is_in_text = at < 0
        if self._is_in_text:
            at = len(self._unread) - held_chars(self._unread, (self._quote,), size)
        self._add_arguments(dumps(self._take(at), ensure_ascii=False)[1:-1])
        if not self._is_in_text:
            self._take(size)
            self._add_arguments('"')

    def _read_part(self) -> None:
        self._take(len(self._unread) - len(self._unread.lstrip()))
        if self._unread.startswith(self._quote):
            self._take(len(self._quote))
            self._is_in_text = True
            self._add_arguments('"')
        elif self._quote.startswith(self._unread):
            return
        elif self._unread[0] in "{}[],:":
            self._read_punctuation(self._take(1))
        else:
            self._read_word()

    def _read_punctuation(self, char: str) -> None:
        self._add_arguments(f"{char} " if char in ",:" else char)
        if char in "{[":
            self._brackets += char
        elif char in "}]":
            self._brackets = self._brackets[:-1]
        self._is_key = char in "{," and self._brackets.endswith("{")
        if not self._brackets:
            self._end_call()

    def _read_word(self) -> None:
        match = _WORD.match(self._unread)
        if match is None or match.end() == len(self._unread):
            self.has_failed = len(self._unread) > CALL_HEADER_CHARS_MAX
            return
        word = self._take(match.end()).strip()
        self._add_arguments(dumps(word, ensure_ascii=False) if self._is_key else _json_value(word))


def _json_value(word: str) -> str:
    """Return a number or constant as JSON, and any other word as a string without quotes."""
    word = _PYTHON_CONSTANTS.get(word, word)
    try:
        loads(word, parse_constant=_reject_constant)
    except ValueError:
        return dumps(word, ensure_ascii=False)
    return word


def _reject_constant(word: str) -> Any:
    raise ValueError(word)


@dataclass(frozen=True, slots=True)
class _BraceGrammar:
    start: str
    quote: str
    end: str

    def build(self, tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
        call = row(self.start, one_of(tools, self._call), self.end)
        return row(BLANK_LINES, repeat(call, "", options))

    def _call(self, tool: ToolSpec) -> Expression:
        require_plain_name(tool)
        return row(f"call:{tool.name}", self._object(tool, tool.parameters, 0))

    def _object(self, tool: ToolSpec, schema: Mapping[str, Any], depth: int) -> Expression:
        """Return the expression of an object with its keys in the templates' sorted order."""
        schema = resolve(schema, tool.parameters)
        unsupported = schema.keys() - _KNOWN - ANNOTATIONS
        if unsupported and tool.is_strict:
            keyword = min(unsupported)
            tool.refuse(f"this model's format supports no {keyword!r} beside 'properties'")
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        required = required if isinstance(required, list) else []
        following = first = row()
        for key in sorted(properties, key=str.lower, reverse=True):
            if re.fullmatch(r"[^\s,:{}\[\]<>]+", key) is None:
                tool.refuse(f"this model's format does not allow the name {key[:100]!r}")
            value = row(f"{key}:", self._value(tool, properties[key], depth + 1))
            is_required = key in required
            first = (
                row(value, following) if is_required else row(OneOf((row(value, following), first)))
            )
            following = row(row(",", value) if is_required else Maybe(row(",", value)), following)
        return row("{", first, "}")

    def _value(self, tool: ToolSpec, schema: Any, depth: int) -> Expression:
        """Return the expression of a value that the schema allows."""
        if depth > CALL_VALUES_DEPTH_MAX:
            most = CALL_VALUES_DEPTH_MAX
            tool.refuse(f"its parameters are nested deeper than {most} levels, or are recursive")
        schema = resolve(schema, tool.parameters)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                return OneOf(tuple(self._value(tool, part, depth + 1) for part in schema[name]))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return OneOf(tuple(self._constant(tool, value) for value in values))
        types = value_types(schema, tool.parameters) or {"string"}
        return OneOf(
            tuple(self._typed_value(tool, schema, type_, depth) for type_ in sorted(types))
        )

    def _typed_value(
        self, tool: ToolSpec, schema: dict[str, Any], type_: str, depth: int
    ) -> Expression:
        if type_ == "string":
            if tool.rules:
                return row(self.quote, rules_text(tool, self.quote, self.quote[0]))
            texts = string_options(tool, {**schema, "type": "string"})
            free = (Until(self.quote, (self.quote,), text.patterns) for text in texts)
            return row(self.quote, OneOf(tuple(free)))
        if type_ == "object":
            return self._object(tool, schema, depth)
        if type_ == "array":
            item = self._value(tool, schema.get("items", {}), depth + 1)
            return row("[", _items(schema, item), "]")
        return Json({**schema, "type": type_}, tool.is_strict)

    def _constant(self, tool: ToolSpec, value: Any) -> Expression:
        if isinstance(value, (dict, list)):
            tool.refuse("this model's format supports no object or list as a constant")
        if not isinstance(value, str):
            return row(dumps(value))
        if self.quote in value:
            tool.refuse("one of its values contains a mark of this model's format")
        return row(f"{self.quote}{value}{self.quote}")


def _items(schema: Mapping[str, Any], item: Expression) -> Expression:
    """Return a list's items, counted up to a limit."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    following = row(",", item)
    if not isinstance(most, int) or most > CALL_ITEMS_COUNTED_MAX:
        some = row(item, *[following] * (min(least, CALL_ITEMS_COUNTED_MAX) - 1), Many(following))
        return some if least else Maybe(some)
    rest: Expression = row()
    for index in range(most - 1, -1, -1):
        one = row(item if index == 0 else following, rest)
        rest = one if index < least else Maybe(one)
    return rest
