"""Calls with the name, and perhaps an id, before a JSON object."""

import re
from typing import Any

from node.dialect.call_reader import CallReader, MakeReader
from node.dialect.json_scanner import JsonScanner
from node.limits import CALL_HEADER_CHARS_MAX


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
