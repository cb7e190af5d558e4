"""Calls that are read when all of them is there, by a parser made for them."""

from collections.abc import Callable
from json import dumps
from typing import Any

from node.dialect.call_body import CallBody

Parse = Callable[[str, list[Any] | None], Any]


class WholeCalls(CallBody):
    """For formats whose arguments cannot be told before their end."""

    def __init__(self, tools: list[Any] | None, parse: Parse) -> None:
        super().__init__(tools)
        self._parse = parse

    def _finish(self, *, is_cut: bool) -> None:
        try:
            parsed = self._parse(self._left.strip(), self.tools)
        except Exception:  # noqa: BLE001 - model output: any failure of a parser means "no call"
            self.has_failed = True
            return
        self._take(len(self._left))
        for call in parsed if isinstance(parsed, list) else [parsed]:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or not name:
                self.has_failed = True
                return
            own_id, arguments = call.get("id"), call.get("arguments")
            self._begin(name, own_id if isinstance(own_id, str) else None)
            self._write(arguments if isinstance(arguments, str) else _spelled(arguments))
            self._end()


def _spelled(arguments: Any) -> str:
    return dumps({} if arguments is None else arguments, ensure_ascii=False)
