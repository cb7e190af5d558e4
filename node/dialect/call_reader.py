"""Incremental parser of one section of tool calls: the base that all formats share."""

from collections.abc import Callable
from dataclasses import dataclass
from json import JSONDecodeError, loads
from typing import Any


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a call, with the id if the model wrote one."""

    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Next piece of a call's arguments, in JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """End of a complete call."""


CallEvent = CallStart | CallArguments | CallEnd


class CallReader:
    """Parser of one section of calls; subclasses implement `_read` and `_finish`."""

    def __init__(self, tools: list[Any] | None) -> None:
        self.tools = tools
        self.is_enforced = False  # a grammar was enforced, so its JSON is valid
        self.names: frozenset[str] | None = None  # names of the tools that may be called; None: any
        self.has_failed = False
        self.calls_count = 0
        self.read_chars = 0  # up to the end of the last complete call
        self._unread = ""
        self._taken_chars = 0
        self._arguments: str | None = None  # arguments of the open call
        self._events: list[CallEvent] = []

    @property
    def is_in_value(self) -> bool:
        """Whether the next text belongs to an argument, even if it looks like an end mark."""
        return False

    @property
    def unread(self) -> str:
        """Text that was fed and is not parsed yet."""
        return self._unread

    @property
    def is_complete(self) -> bool:
        """Whether there are calls and the last one has ended."""
        return self.calls_count > 0 and self._arguments is None

    def feed(self, text: str) -> list[CallEvent]:
        if not self.has_failed:
            self._unread += text
            self._read()
        return self._drain()

    def close(self, *, is_cut: bool) -> list[CallEvent]:
        """Read the rest; set `has_failed` if it is not a complete call.

        `is_cut`: the section's end mark is missing.
        """
        if not self.has_failed:
            self._finish(is_cut=is_cut)
        self.has_failed = self.has_failed or not self.is_complete
        return self._drain()

    def _read(self) -> None:
        """Parse the unread text as far as it is unambiguous."""

    def _finish(self, *, is_cut: bool) -> None:
        """Parse the text that was ambiguous before the section's end."""

    def _drain(self) -> list[CallEvent]:
        events, self._events = self._events, []
        return events

    def _take(self, count: int) -> str:
        text, self._unread = self._unread[:count], self._unread[count:]
        self._taken_chars += count
        return text

    def _start_call(self, name: str, model_id: str | None = None) -> None:
        self._arguments = ""
        if self.names is None or name in self.names:
            self._events.append(CallStart(name, model_id))
        else:
            self.has_failed = True

    def _add_arguments(self, text: str) -> None:
        assert self._arguments is not None, "a call is open"
        if text and not self.has_failed:
            self._arguments += text
            self._events.append(CallArguments(text))

    def _end_call(self) -> None:
        """Close the open call; fail unless its arguments are a JSON object."""
        if self.has_failed:
            return
        try:
            is_object = isinstance(loads(self._arguments or ""), dict)
        except (JSONDecodeError, RecursionError):
            is_object = False
        if not is_object:
            self.has_failed = True
            return
        self._arguments = None
        self.calls_count += 1
        self.read_chars = self._taken_chars
        self._events.append(CallEnd())


MakeReader = Callable[[list[Any] | None], CallReader]
