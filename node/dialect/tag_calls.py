"""Calls whose arguments stand between tags, one by one, each as plain text."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError, dumps, loads
from typing import Any

from node.dialect.call_grammar import BLANK_LINES
from node.dialect.call_reader import CallReader
from node.dialect.json_scanner import JsonScanner
from node.dialect.text_filters import held_chars
from node.dialect.tool_schema import argument_types
from node.grammar.expression import Expression, row
from node.limits import CALL_CODE_CHARS_MAX, CALL_HEADER_CHARS_MAX


@dataclass(frozen=True, slots=True)
class TagFormat:
    """Tags around a section of calls, a call and an argument: as written, and as patterns to read.

    Written tags have NAME and KEY in place of the names, and some the call's INDEX and the value's
    TYPE. Patterns name groups `name` and `key`, and some `is_text` (states whether the value is a
    text) and `opening` (of a quoted value). An argument without a key is all arguments in JSON.
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
    other_ends: Mapping[str, str] = field(default_factory=dict)  # of values with an `opening`
    # What is written:
    line_end: str = ""  # before an argument's end
    text_argument: tuple[str, ...] = ()  # tags of a text, if they differ
    shares_section: bool = False  # one section holds all calls
    between: str = "\n"  # calls, or sections
    quotes: tuple[str, str] | None = None  # around a text that cannot stand plain
    quoted_chars: str = ""  # that a plain text cannot have
    before: Expression = BLANK_LINES
    after: Expression = field(default_factory=row)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TagFormat":
        return self  # constant: the copies of a reader share it


class TagCallReader(CallReader):
    """Reader that streams texts as they come, and other values when their end tag is there."""

    def __init__(self, tools: list[Any] | None, tags: TagFormat) -> None:
        super().__init__(tools)
        self._tags = tags
        self._name = ""
        self._key: str | None = None  # of the current argument
        self._is_text = False
        self._states_type = False  # its tag does
        self._missing = "{}"  # to complete the arguments' JSON, if the call ended here
        self._is_first_text = False  # nothing of the value has been read
        self._value = ""  # so far, if it is not a text
        self._end_tag = ""  # of the value

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
            self._unread += "\n"  # the section's end also ends a name without arguments
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
        self._end_tag = self._tags.other_ends.get(opening or "", self._tags.argument_end)
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
        at = self._value_end()
        if at < 0:
            ends = (f"\n{self._end_tag}",) if self._tags.has_lines else ()
            held = held_chars(self._unread, (*ends, self._end_tag), len(self._end_tag) + 1)
            self._add_value(self._take(len(self._unread) - held))
            return
        value = self._take(at)
        self._take(len(self._end_tag))
        self._add_value(value.removesuffix("\n") if self._tags.has_lines else value)
        self._add_arguments('"' if self._is_text else self._json_value())
        self._key = None

    def _value_end(self) -> int:
        """Return where the end tag is; a string of enforced JSON may contain it."""
        at = self._unread.find(self._end_tag)
        while at >= 0 and self.is_enforced and not self._is_text:
            scanner = JsonScanner()
            scanner.feed(self._value + self._unread[:at])
            if not scanner.is_in_string:
                break
            at = self._unread.find(self._end_tag, at + 1)
        return at

    def _add_value(self, text: str) -> None:
        if self._is_text:
            self._add_arguments(dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _close_call(self) -> None:
        self._add_arguments(self._missing)
        self._end_call()

    def _json_value(self) -> str:
        """Return the value in JSON: parsed as JSON or Python, or else as a text."""
        assert self._key is not None, "within an argument"
        types, text = self._types(self._key), self._value.strip()
        encoded = None
        try:
            value, encoded = loads(text, parse_constant=_reject_constant), text
        except (ValueError, RecursionError):
            value = _parse_loosely(text, self._value)
        is_null = value is None and "null" in types
        may_be_text = types <= {"string", "null"} if self._states_type else True
        if "string" in types and may_be_text and not isinstance(value, str) and not is_null:
            value, encoded = self._value, None  # a number where the schema wants a text
        return dumps(value, ensure_ascii=False) if encoded is None else encoded

    def _types(self, key: str) -> set[str]:
        """Return the types that the tool's schema allows; none if it does not say."""
        for tool in self.tools or ():
            function = tool.get("function", tool) if isinstance(tool, dict) else {}
            if isinstance(function, dict) and function.get("name") == self._name:
                parameters = function.get("parameters")
                return argument_types(parameters if isinstance(parameters, dict) else {}, key)
        return set()


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
