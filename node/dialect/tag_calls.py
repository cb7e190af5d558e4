"""Calls whose arguments stand between tags, one by one, each as plain text."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from json import JSONDecodeError, dumps, loads
from typing import Any

from node.dialect.call_body import CallBody
from node.dialect.json_value import JsonValue
from node.dialect.marks import held_chars
from node.dialect.schema_parts import argument_kinds
from node.limits import CALL_CODE_CHARS_MAX, CALL_HEADER_CHARS_MAX


@dataclass(frozen=True, slots=True)
class Tags:
    """How a format spells them; patterns name groups `name` and `key`.

    Without a key, a value is all arguments in one.
    """

    call: re.Pattern[str]
    argument: re.Pattern[str]
    argument_end: str
    call_end: str = ""  # "": where the section ends
    has_lines: bool = True  # a value stands on lines of its own
    guesses: bool = False  # what kind of value it is, where the tool does not say
    has_entities: bool = False  # `&quot;` and `&amp;` in names
    # Of values with an `opening`, by it.
    other_ends: Mapping[str, str] = field(default_factory=dict)


class TagCalls(CallBody):
    """Texts are handed on as they come; other values when their end tag is there."""

    def __init__(self, tools: list[Any] | None, tags: Tags) -> None:
        super().__init__(tools)
        self._tags = tags
        self._name = ""
        self._key: str | None = None  # of the argument that is being read
        self._is_text = False
        self._is_told = False  # whether it is a text
        self._missing = "{}"  # of the arguments' JSON, if the call ended here
        self._is_fresh = False  # nothing of the value was read
        self._value = ""  # so far, where it is no text
        self._end_tag = ""  # of the value

    @property
    def is_in_value(self) -> bool:
        return self._key is not None

    def _read(self) -> None:
        while self._left and not self.has_failed:
            before = len(self._left)
            if self._key is not None:
                self._read_value()
            elif self._arguments is not None:
                self._read_inside()
            else:
                self._read_call()
            if len(self._left) == before:
                return

    @property
    def is_whole(self) -> bool:
        return super().is_whole and not self._left.strip()

    def _finish(self, *, is_cut: bool) -> None:
        if self._tags.call_end or is_cut:
            return
        if self._arguments is None:
            self._left += "\n"  # a name without arguments ends with the section
            self._read()
        if self._arguments is not None and self._key is None:
            self._close_call()
            self._take(len(self._left))

    def _read_call(self) -> None:
        found = self._tags.call.search(self._left)
        if found is None:
            self.has_failed = self.calls_count == 0 and len(self._left) > CALL_HEADER_CHARS_MAX
            return
        self._take(found.end())
        self._name, self._missing = self._unescaped(found["name"]), "{}"
        self._begin(self._name)

    def _read_inside(self) -> None:
        found = self._tags.argument.search(self._left)
        end = self._left.find(self._tags.call_end) if self._tags.call_end else -1
        if end >= 0 and (found is None or end < found.start()):
            self._take(end + len(self._tags.call_end))
            self._close_call()
        elif found is not None:
            self._take(found.end())
            self._begin_argument(found.groupdict())
        else:
            self.has_failed = len(self._left) > CALL_HEADER_CHARS_MAX

    def _begin_argument(self, said: Mapping[str, str | None]) -> None:
        key, is_text, opening = said["key"], said.get("is_text"), said.get("opening")
        self._key, self._value = self._unescaped(key or ""), ""
        self._end_tag = self._tags.other_ends.get(opening or "", self._tags.argument_end)
        if key is None:
            self._is_text, self._missing = False, ""
            return
        kinds = self._kinds(self._key)
        self._is_told = is_text is not None
        if self._is_told:
            self._is_text = is_text in ("true", "string")
        else:
            self._is_text = kinds == {"string"} or (not kinds and not self._tags.guesses)
        first = "{" if self._missing == "{}" else ", "
        self._write(first + dumps(self._key, ensure_ascii=False) + ": ")
        if self._is_text:
            self._write('"')
        self._missing = "}"
        self._is_fresh = True

    def _unescaped(self, name: str) -> str:
        if not self._tags.has_entities:
            return name
        return name.replace("&quot;", '"').replace("&amp;", "&")

    def _read_value(self) -> None:
        if self._tags.has_lines and self._is_fresh:
            self._is_fresh = False
            self._take(self._left.startswith("\n"))
        at = self._value_end()
        if at < 0:
            ends = (f"\n{self._end_tag}",) if self._tags.has_lines else ()
            held = held_chars(self._left, (*ends, self._end_tag), len(self._end_tag) + 1)
            self._add(self._take(len(self._left) - held))
            return
        value = self._take(at)
        self._take(len(self._end_tag))
        self._add(value.removesuffix("\n") if self._tags.has_lines else value)
        self._write('"' if self._is_text else self._converted())
        self._key = None

    def _value_end(self) -> int:
        """Return where the end tag is; within a text of JSON that is enforced it is none."""
        at = self._left.find(self._end_tag)
        while at >= 0 and self.is_enforced and not self._is_text:
            value = JsonValue()
            value.feed(self._value + self._left[:at])
            if not value.is_in_string:
                break
            at = self._left.find(self._end_tag, at + 1)
        return at

    def _add(self, text: str) -> None:
        if self._is_text:
            self._write(dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _close_call(self) -> None:
        self._write(self._missing)
        self._end()

    def _converted(self) -> str:
        """Spell a value in JSON: as JSON or Python has it, or else as text."""
        assert self._key is not None, "inside of an argument"
        kinds, text = self._kinds(self._key), self._value.strip()
        spelled = None
        try:
            value, spelled = loads(text, parse_constant=_no_json), text
        except (ValueError, RecursionError):
            value = _loose(text, self._value)
        is_null = value is None and "null" in kinds
        may_be_text = kinds <= {"string", "null"} if self._is_told else True
        if "string" in kinds and may_be_text and not isinstance(value, str) and not is_null:
            value, spelled = self._value, None  # a number in a text is a text
        return dumps(value, ensure_ascii=False) if spelled is None else spelled

    def _kinds(self, key: str) -> set[str]:
        """Return the types that the tool gives an argument; none if it does not say."""
        for tool in self.tools or ():
            function = tool.get("function", tool) if isinstance(tool, dict) else {}
            if isinstance(function, dict) and function.get("name") == self._name:
                parameters = function.get("parameters")
                return argument_kinds(parameters if isinstance(parameters, dict) else {}, key)
        return set()


def _no_json(word: str) -> Any:
    raise ValueError(word)


def _loose(text: str, otherwise: str) -> Any:
    """Read what is JSON but for its line ends, or Python."""
    try:
        return loads(text, strict=False)
    except (JSONDecodeError, RecursionError):
        return _literal(text, otherwise)


def _literal(text: str, otherwise: str) -> Any:
    if len(text) > CALL_CODE_CHARS_MAX:
        return otherwise
    try:
        value = ast.literal_eval(text)
        dumps(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return otherwise
    return value
