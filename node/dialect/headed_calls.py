"""Calls whose name, and perhaps id, stand in front of a JSON object."""

import re
from typing import Any

from node.dialect.call_body import CallBody
from node.dialect.json_value import JsonValue
from node.limits import CALL_HEADER_CHARS_MAX


class HeadedCalls(CallBody):
    """`header` matches from the end of one call to the beginning of the next one's arguments.

    `tail` matches what may stand behind the last one.
    """

    def __init__(
        self, tools: list[Any] | None, header: re.Pattern[str], tail: re.Pattern[str]
    ) -> None:
        super().__init__(tools)
        self._header = header
        self._tail = tail
        self._value: JsonValue | None = None

    @property
    def is_in_value(self) -> bool:
        return self._value is not None and self._value.is_in_string

    @property
    def is_whole(self) -> bool:
        return super().is_whole and self._tail.fullmatch(self._left) is not None

    def _read(self) -> None:
        while self._left and not self.has_failed:
            if self._value is None:
                found = self._header.match(self._left)
                if found is None:
                    self.has_failed = len(self._left) > CALL_HEADER_CHARS_MAX
                    return
                self._take(found.end())
                named = found.groupdict()
                self._begin(named.get("name") or named["other_name"], named.get("id"))
                self._value = JsonValue()
            else:
                self._write(self._take(self._value.feed(self._left)))
                if not self._value.has_ended:
                    return
                self._value = None
                self._end()
