"""Calls that are JSON objects with a name and arguments, alone, in a list, or in a row."""

import re
from json import JSONDecodeError, dumps, loads
from typing import Any

from node.dialect.call_body import CallBody
from node.dialect.json_value import JsonValue

_NAMES = frozenset({"name", "tool_name", "function"})
_ARGUMENTS = frozenset({"arguments", "parameters"})
_IDS = frozenset({"id", "call_id"})
_KEY = re.compile(r'[\s,]*"((?:[^"\\]|\\.)*)"\s*:\s*', re.DOTALL)
_SPACE = re.compile(r"[\s,;\[\]]*")


class JsonCalls(CallBody):
    """Arguments are handed on as they are written, once the name in front of them is known."""

    def __init__(
        self,
        tools: list[Any] | None,
        names: frozenset[str] | None = None,
        *,
        has_id_last: bool = False,
    ) -> None:
        """Take what may be called, where other names make it no call.

        `has_id_last`: a call is told when it is complete, for its id comes behind the arguments.
        """
        super().__init__(tools)
        self._allowed = names
        self._has_id_last = has_id_last
        self._is_inside = False  # of a call's braces
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._name: str | None = None
        self._id: str | None = None
        self._text = ""  # of the value that is being read
        self._held: str | None = None  # arguments that came before the name

    @property
    def is_in_value(self) -> bool:
        return self._value is not None and self._value.is_in_string

    @property
    def is_whole(self) -> bool:
        return super().is_whole and not self._is_inside

    def _read(self) -> None:
        while self._left and not self.has_failed:
            before = len(self._left), self._value
            if self._value is not None:
                self._read_value()
            elif self._is_inside:
                self._read_key()
            else:
                self._read_outside()
            if (len(self._left), self._value) == before:
                return

    def _read_outside(self) -> None:
        found = _SPACE.match(self._left)
        self._take(found.end() if found else 0)
        if self._left.startswith("{"):
            self._take(1)
            self._is_inside = True
            self._name = self._id = self._held = None
        elif self._left:
            if self.calls_count:
                self._take(len(self._left))  # of no use behind a call
            else:
                self.has_failed = True

    def _read_key(self) -> None:
        found = _KEY.match(self._left)
        if found is not None and found.end() < len(self._left):
            self._key = found[1]
            self._take(found.end())
            self._value, self._text = JsonValue(), ""
            if self._allowed is not None and found[1] not in _NAMES | _ARGUMENTS | _IDS | {"type"}:
                self.has_failed = True
            return
        rest = self._left.lstrip(" \t\r\n,")
        if rest.startswith("}"):
            self._take(len(self._left) - len(rest) + 1)
            self._close_object()
        elif rest and not rest.startswith('"'):
            self.has_failed = True

    def _read_value(self) -> None:
        assert self._value is not None, "only called inside of one"
        text = self._take(self._value.feed(self._left))
        self._text += text
        is_arguments = self._key in _ARGUMENTS
        if is_arguments and self._arguments is not None and self._text.startswith("{"):
            self._write(text)
        if not self._value.has_ended:
            return
        self._value = None
        if self._key in _NAMES:
            self._know_name(_parsed(self._text))
        elif self._key in _IDS:
            own_id = _parsed(self._text)
            self._id = own_id if isinstance(own_id, str) else None
        elif is_arguments and not (self._arguments is not None and self._text.startswith("{")):
            self._know_arguments()

    def _know_name(self, name: Any) -> None:
        if isinstance(name, dict):  # {"function": {"name": …, "arguments": …}}
            arguments = name.get("arguments", name.get("parameters", {}))
            self._held = arguments if isinstance(arguments, str) else dumps(arguments)
            name = name.get("name")
        is_allowed = self._allowed is None or name in self._allowed
        if not isinstance(name, str) or not name or not is_allowed or self._name is not None:
            # The kind of a call may be said by the same key: {"type": "function", …}
            self.has_failed = self._name is None
            return
        self._name = name
        if self._has_id_last:
            return
        self._begin(name, self._id)
        if self._held is not None:
            self._write(self._held)

    def _know_arguments(self) -> None:
        """Take arguments that are not an object as they stand, or that stand before the name."""
        value = _parsed(self._text)
        text = value if isinstance(value, str) else self._text
        text = "{}" if value is None or not text.strip() else text
        if self._arguments is not None:
            self._write(text)
        else:
            self._held = text

    def _close_object(self) -> None:
        self._is_inside = False
        if self._has_id_last and self._name is not None:
            self._begin(self._name, self._id)
            self._write(self._held or "")
        if self._arguments is None:
            self.has_failed = True
            return
        if not self._arguments:
            self._write("{}")
        self._end()


def _parsed(text: str) -> Any:
    try:
        return loads(text)
    except (JSONDecodeError, RecursionError):
        return text if text.strip() else None
