"""Formats of thoughts and calls that mlx-lm infers, for models of families not known here."""

import importlib
from collections.abc import Callable
from json import dumps
from typing import Any, Final

from mlx_lm.tokenizer_utils import TokenizerWrapper

from node.dialect.call_grammar import CallGrammar
from node.dialect.call_reader import CallReader
from node.dialect.format_selection import FallbackFormats
from node.dialect.formats import CallFormat, ThoughtFormat
from node.dialect.python_calls import python_grammar

Parse = Callable[[str, list[Any] | None], Any]

# Of formats whose parsers are mlx-lm's.
_GRAMMARS: Final[dict[str, CallGrammar]] = {
    "pythonic": python_grammar("<|tool_call_start|>", "<|tool_call_end|>", is_list=True),
}


class ParsedCallReader(CallReader):
    """Reader that parses a whole section of calls by one of mlx-lm's parsers."""

    def __init__(self, tools: list[Any] | None, parse: Parse) -> None:
        super().__init__(tools)
        self._parse = parse

    def _finish(self, *, is_cut: bool) -> None:
        try:
            parsed = self._parse(self._unread.strip(), self.tools)
        except Exception:  # noqa: BLE001 - model output: any failure of a parser means "no call"
            self.has_failed = True
            return
        self._take(len(self._unread))
        for call in parsed if isinstance(parsed, list) else [parsed]:
            name = call.get("name") if isinstance(call, dict) else None
            if not isinstance(name, str) or not name:
                self.has_failed = True
                return
            model_id, arguments = call.get("id"), call.get("arguments")
            self._start_call(name, model_id if isinstance(model_id, str) else None)
            self._add_arguments(arguments if isinstance(arguments, str) else _json(arguments))
            self._end_call()


def _json(arguments: Any) -> str:
    return dumps({} if arguments is None else arguments, ensure_ascii=False)


def upstream_formats(wrapper: TokenizerWrapper) -> FallbackFormats:
    """Return the formats that mlx-lm inferred."""
    thought, hidden = _channels(wrapper)
    if wrapper.has_thinking:
        thought = ThoughtFormat("mlx-lm", wrapper.think_start, wrapper.think_end)
    calls = None
    if wrapper.has_tool_calling and wrapper.tool_parser is not None:
        name = wrapper.tool_parser.__module__.rsplit(".", 1)[-1]
        calls = _format(name, wrapper.tool_call_start, wrapper.tool_call_end, wrapper.tool_parser)
    return FallbackFormats(thought, calls, (*wrapper.structural_markers, *hidden), parser_named)


def _channels(wrapper: TokenizerWrapper) -> tuple[ThoughtFormat | None, tuple[str, ...]]:
    """Return the thought's marks and the hidden marks of a response format."""
    edges = wrapper.response_transitions
    marks = {text: to for transitions in edges.values() for text, to in transitions}
    start = next((text for text, to in marks.items() if to == "reasoning"), None)
    ends = edges.get("reasoning", [])
    thought = ThoughtFormat("mlx-lm", start, ends[0][0]) if start and ends else None
    return thought, tuple(text for text, to in marks.items() if to not in ("reasoning", "tool"))


def parser_named(name: str) -> CallFormat | None:
    """Return the format of mlx-lm's parser of that name, if there is one."""
    if not name.isidentifier():
        return None
    try:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    except ImportError:
        return None
    return _format(name, module.tool_call_start, module.tool_call_end, module.parse_tool_call)


def _format(name: str, start: str, end: str | None, parse: Parse) -> CallFormat:
    def make(tools: list[Any] | None) -> CallReader:
        return ParsedCallReader(tools, parse)

    return CallFormat(name, (start,), end or "", make, grammar=_GRAMMARS.get(name))
