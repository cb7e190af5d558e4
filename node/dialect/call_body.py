"""The inside of a section of calls, read as it comes: what every format of it shares."""

from dataclasses import dataclass
from json import JSONDecodeError, loads
from typing import Any


@dataclass(frozen=True, slots=True)
class Begun:
    """A call of which the name is known; the id is the model's own, if it gave one."""

    name: str
    id: str | None


@dataclass(frozen=True, slots=True)
class Written:
    """More of the arguments, in JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The last call is complete."""


Part = Begun | Written | Closed


class CallBody:
    """One section; formats say how to `_read` it and what its end means."""

    def __init__(self, tools: list[Any] | None) -> None:
        self.tools = tools
        self.is_enforced = False  # written as a grammar has it, so its JSON is JSON
        self.names: frozenset[str] | None = None  # of what may be called; None: of anything
        self.has_failed = False
        self.calls_count = 0
        self.read_chars = 0  # up to the end of the last complete call
        self._left = ""  # not understood yet
        self._taken_chars = 0
        self._arguments: str | None = None  # of the call that is open
        self._parts: list[Part] = []

    @property
    def is_in_value(self) -> bool:
        """Whether what comes next belongs to an argument, even if it looks like the end."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether nothing of a call is missing."""
        return self.calls_count > 0 and self._arguments is None

    def feed(self, text: str) -> list[Part]:
        if not self.has_failed:
            self._left += text
            self._read()
        return self._drain()

    def close(self, *, is_cut: bool) -> list[Part]:
        """Read what is left; `has_failed` where it is no complete call.

        `is_cut`: the mark that ends the section did not come.
        """
        if not self.has_failed:
            self._finish(is_cut=is_cut)
        self.has_failed = self.has_failed or not self.is_whole
        return self._drain()

    def _read(self) -> None:
        """Understand more of what is left, as far as it is certain."""

    def _finish(self, *, is_cut: bool) -> None:
        """Read what only the section's end makes certain."""

    def _drain(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _take(self, count: int) -> str:
        taken, self._left = self._left[:count], self._left[count:]
        self._taken_chars += count
        return taken

    def _begin(self, name: str, own_id: str | None = None) -> None:
        self._arguments = ""
        if self.names is None or name in self.names:
            self._parts.append(Begun(name, own_id))
        else:
            self.has_failed = True

    def _write(self, text: str) -> None:
        assert self._arguments is not None, "begun"
        if text and not self.has_failed:
            self._arguments += text
            self._parts.append(Written(text))

    def _end(self) -> None:
        """Close the open call, if its arguments are an object."""
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
        self._parts.append(Closed())
