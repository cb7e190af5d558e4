"""Reader and grammar of calls written as JSON objects, with the name inside or before them."""

import re
from collections.abc import Sequence
from json import JSONDecodeError, dumps, loads
from typing import Any

from node.dialect.call_grammar import (
    BLANK_LINES,
    CallGrammar,
    GrammarOptions,
    json_arguments,
    one_of,
    quote,
    repeat,
)
from node.dialect.call_reader import CallReader, MakeReader
from node.dialect.formats import CallFormat, TemplateSign
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression, Literal, Maybe, row
from node.limits import CALL_HEADER_CHARS_MAX

_IN_STRING = re.compile(r'[^"\\]*')
_PLAIN = re.compile(r'[^"{}\[\],\s]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')


class JsonScanner:
    """Scanner of one value; it looks at brackets and quotes only."""

    def __init__(self) -> None:
        self.has_ended = False
        self.is_in_string = False
        self._is_escaped = False
        self._depth = 0
        self._has_begun = False

    def feed(self, text: str) -> int:
        """Return how many of the characters belong to the value."""
        at = 0
        while at < len(text) and not self.has_ended:
            at = self._in_string(text, at) if self.is_in_string else self._outside(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _match_end(_IN_STRING, text, at)
        if at == len(text):
            return at
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self.is_in_string = False
            self.has_ended = self._depth == 0
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self.is_in_string = self._has_begun = True
        elif char in "{[":
            self._depth += 1
            self._has_begun = True
        elif self._depth:
            if char in "}]":
                self._depth -= 1
                self.has_ended = self._depth == 0
                return at + 1
            return max(at + 1, _match_end(_BETWEEN, text, at))
        elif self._has_begun:  # a number or a word: only the next character ends it
            stop = _match_end(_PLAIN, text, at)
            self.has_ended = stop < len(text)
            return stop
        elif not char.isspace():
            self._has_begun = True
            return at
        return at + 1


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "the pattern matches an empty text"
    return match.end()


_NAMES = frozenset({"name", "tool_name", "function"})
_ARGUMENTS = frozenset({"arguments", "parameters"})
_IDS = frozenset({"id", "call_id"})
_KEY = re.compile(r'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*', re.DOTALL)
_SPACE = re.compile(r"[\s,;\[\]]*")


class JsonCallReader(CallReader):
    """Reader that streams arguments as written, once the name before them is known."""

    def __init__(
        self,
        tools: list[Any] | None,
        names: frozenset[str] | None = None,
        *,
        has_id_last: bool = False,
    ) -> None:
        """Fail at the name of a tool that is not in `names`, if given.

        `has_id_last`: the id follows the arguments, so a call is reported when it is complete.
        """
        super().__init__(tools)
        self._allowed = names
        self._has_id_last = has_id_last
        self._is_in_call = False
        self._key: str | None = None
        self._value: JsonScanner | None = None
        self._name: str | None = None
        self._id: str | None = None
        self._text = ""  # text of the current value
        self._held: str | None = None  # arguments that came before the name

    @property
    def is_in_value(self) -> bool:
        return self._value is not None and self._value.is_in_string

    @property
    def is_complete(self) -> bool:
        return super().is_complete and not self._is_in_call

    def _read(self) -> None:
        while self._unread and not self.has_failed:
            before = len(self._unread), self._value
            if self._value is not None:
                self._read_value()
            elif self._is_in_call:
                self._read_key()
            else:
                self._read_outside()
            if (len(self._unread), self._value) == before:
                return

    def _finish(self, *, is_cut: bool) -> None:
        """Begin a call whose id was to come last, with the arguments so far."""
        is_begun = self._arguments is not None
        if not self._has_id_last or self._name is None or is_begun or not self._is_in_call:
            return
        is_in_arguments = self._value is not None and self._key in _ARGUMENTS
        self._start_call(self._name, self._id)
        self._add_arguments(self._text if is_in_arguments else self._held or "")

    def _read_outside(self) -> None:
        space = _SPACE.match(self._unread)
        self._take(space.end() if space else 0)
        if self._unread.startswith("{"):
            self._take(1)
            self._is_in_call = True
            self._name = self._id = self._held = None
        elif self._unread:
            if self.calls_count:
                self._take(len(self._unread))  # text after a call is ignored
            else:
                self.has_failed = True

    def _read_key(self) -> None:
        key = _KEY.match(self._unread)
        if key is not None and key.end() < len(self._unread):
            self._key = key[1]
            self._take(key.end())
            self._value, self._text = JsonScanner(), ""
            if self._allowed is not None and key[1] not in _NAMES | _ARGUMENTS | _IDS | {"type"}:
                self.has_failed = True
            return
        rest = self._unread.lstrip(" \t\r\n,")
        if rest.startswith("}"):
            self._take(len(self._unread) - len(rest) + 1)
            self._close_object()
        elif rest and not rest.startswith('"'):
            self.has_failed = True

    def _read_value(self) -> None:
        assert self._value is not None, "only called within a value"
        text = self._take(self._value.feed(self._unread))
        self._text += text
        is_arguments = self._key in _ARGUMENTS
        if is_arguments and self._arguments is not None and self._text.startswith("{"):
            self._add_arguments(text)
        if not self._value.has_ended:
            return
        self._value = None
        if self._key in _NAMES:
            self._set_name(_parse(self._text))
        elif self._key in _IDS:
            model_id = _parse(self._text)
            self._id = model_id if isinstance(model_id, str) else None
        elif is_arguments and not (self._arguments is not None and self._text.startswith("{")):
            self._set_arguments()

    def _set_name(self, name: Any) -> None:
        if isinstance(name, dict):  # {"function": {"name": …, "arguments": …}}
            arguments = name.get("arguments", name.get("parameters", {}))
            self._held = arguments if isinstance(arguments, str) else dumps(arguments)
            name = name.get("name")
        is_allowed = self._allowed is None or name in self._allowed
        if not isinstance(name, str) or not name or not is_allowed or self._name is not None:
            # The same key may also state the kind of call: {"type": "function", …}
            self.has_failed = self._name is None
            return
        self._name = name
        if self._has_id_last:
            return
        self._start_call(name, self._id)
        if self._held is not None:
            self._add_arguments(self._held)

    def _set_arguments(self) -> None:
        """Take arguments that are not an object, or that come before the name."""
        value = _parse(self._text)
        text = value if isinstance(value, str) else self._text
        text = "{}" if value is None or not text.strip() else text
        if self._arguments is not None:
            self._add_arguments(text)
        else:
            self._held = text

    def _close_object(self) -> None:
        self._is_in_call = False
        if self._has_id_last and self._name is not None:
            self._start_call(self._name, self._id)
            self._add_arguments(self._held or "")
        if self._arguments is None:
            self.has_failed = True
            return
        if not self._arguments:
            self._add_arguments("{}")
        self._end_call()


def _parse(text: str) -> Any:
    try:
        return loads(text)
    except (JSONDecodeError, RecursionError):
        return text if text.strip() else None


def json_call(
    tool: ToolSpec, name: str = "name", key: str = "arguments", first: Expression | None = None
) -> Expression:
    """Return an object with a name and arguments; `first` comes right after its brace."""
    head: tuple[Expression | str, ...] = ("{",) if first is None else ("{", first)
    return row(*head, f'"{name}": {quote(tool.name)}, "{key}": ', json_arguments(tool), "}")


def json_grammar(start: str, end: str) -> CallGrammar:
    """Return the grammar of calls that each stand between marks."""

    def grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
        line = Maybe(Literal("\n"))
        call = row(start, line, one_of(tools, json_call), line, end)
        return row(BLANK_LINES, repeat(call, "\n", options))

    return grammar


def json_list_format(
    name: str, start: str, end: str, signs: tuple[TemplateSign, ...]
) -> CallFormat:
    """Return the format of a list of calls between marks."""

    def grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
        calls = repeat(one_of(tools, json_call), ", ", options)
        return row(BLANK_LINES, start, "[", calls, "]", end)

    return CallFormat(name, (start,), end, JsonCallReader, grammar=grammar, signs=signs)


class HeaderCallReader(CallReader):
    """Reader of calls whose `header` matches all between two calls' arguments.

    `tail` matches what may follow the last one.
    """

    def __init__(
        self, tools: list[Any] | None, header: re.Pattern[str], tail: re.Pattern[str]
    ) -> None:
        super().__init__(tools)
        self._header = header
        self._tail = tail
        self._value: JsonScanner | None = None

    @property
    def is_in_value(self) -> bool:
        return self._value is not None and self._value.is_in_string

    @property
    def is_complete(self) -> bool:
        return super().is_complete and self._tail.fullmatch(self._unread) is not None

    def _read(self) -> None:
        while self._unread and not self.has_failed:
            if self._value is None:
                header = self._header.match(self._unread)
                if header is None:
                    self.has_failed = len(self._unread) > CALL_HEADER_CHARS_MAX
                    return
                self._take(header.end())
                groups = header.groupdict()
                self._start_call(groups.get("name") or groups["other_name"], groups.get("id"))
                self._value = JsonScanner()
            else:
                self._add_arguments(self._take(self._value.feed(self._unread)))
                if not self._value.has_ended:
                    return
                self._value = None
                self._end_call()


def header_reader(header: str, tail: str) -> MakeReader:
    """Return a maker of readers for these regular expressions."""
    patterns = re.compile(header), re.compile(tail)

    def make(tools: list[Any] | None) -> CallReader:
        return HeaderCallReader(tools, *patterns)

    return make
