"""Calls that may be JSON or Python: their first character decides."""

from typing import Any

from node.dialect.call_reader import CallEvent, CallReader
from node.dialect.json_calls import JsonCallReader
from node.dialect.python_calls import PythonCallReader
from node.dialect.tool_schema import tool_names


class BareCallReader(CallReader):
    """Reader of `{"name": …}` or `[f(x=1)]`; `otherwise` reads anything else."""

    def __init__(
        self,
        tools: list[Any] | None,
        otherwise: CallReader | None = None,
        *,
        is_marked: bool = False,
    ) -> None:
        """Accept only names of `tools`, unless a mark precedes the call."""
        super().__init__(tools)
        self._allowed = None if is_marked else tool_names(tools)
        self._otherwise = otherwise
        self._inner: CallReader | None = None

    @property
    def is_in_value(self) -> bool:
        return self._inner is not None and self._inner.is_in_value

    @property
    def unread(self) -> str:
        return self._unread if self._inner is None else self._inner.unread

    def feed(self, text: str) -> list[CallEvent]:
        if self._inner is not None:
            return self._forward(self._inner.feed(text))
        self._unread += text
        first = self._unread.lstrip()
        if not first or (first[0] == "[" and not first[1:].strip()):
            return []
        if first[0] == "{" or (first[0] == "[" and first[1:].lstrip()[:1] == "{"):
            # Only Mistral has an `otherwise`, and its ids follow the arguments.
            has_id_last = self._otherwise is not None
            self._inner = JsonCallReader(self.tools, self._allowed, has_id_last=has_id_last)
        else:
            self._inner = self._otherwise or PythonCallReader(self.tools, self._allowed)
        self._inner.is_enforced, self._inner.names = self.is_enforced, self.names
        unread, self._unread = self._unread, ""
        return self._forward(self._inner.feed(unread))

    def close(self, *, is_cut: bool) -> list[CallEvent]:
        if self._inner is None:
            self.has_failed = True
            return []
        return self._forward(self._inner.close(is_cut=is_cut))

    def _forward(self, events: list[CallEvent]) -> list[CallEvent]:
        assert self._inner is not None, "it has read them"
        self.has_failed = self._inner.has_failed
        self.calls_count, self.read_chars = self._inner.calls_count, self._inner.read_chars
        return events
