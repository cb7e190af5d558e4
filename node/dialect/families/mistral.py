"""Mistral: the name before JSON, or with earlier tokenizers a list of objects."""

from collections.abc import Sequence
from typing import Any

from node.dialect.bare_calls import BareCallReader
from node.dialect.call_grammar import (
    BLANK_LINES,
    GrammarOptions,
    json_arguments,
    one_of,
    quote,
    repeat,
    require_plain_name,
)
from node.dialect.call_reader import CallReader
from node.dialect.formats import CallFormat, Family, ThoughtFormat, sign
from node.dialect.json_calls import header_reader
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression, Literal, Maybe, Pattern, row

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_TEXT = Pattern("[0-9A-Za-z]{9}")
_make_named_reader = header_reader(
    header=r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.\-]+)\s*"
    r"(?:\[CALL_ID\](?P<id>[^\[\]]*))?\[ARGS\]\s*(?={)",
    tail=r"\s*",
)


def _make_reader(tools: list[Any] | None) -> CallReader:
    return BareCallReader(tools, _make_named_reader(tools), is_marked=True)


def _grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    """Return the grammar of calls in the marks that the tokenizer has."""
    if _ARGUMENTS not in options.special_texts:
        return _call_list(tools, options)
    has_id = _ID in options.special_texts and _ID in options.template
    call_id = (Maybe(row(_ID, _ID_TEXT)),) if has_id else ()

    def call(tool: ToolSpec) -> Expression:
        require_plain_name(tool)
        return row(tool.name, *call_id, _ARGUMENTS, json_arguments(tool))

    return row(BLANK_LINES, repeat(row(_START, one_of(tools, call)), "", options))


def _call_list(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    call_id = row(', "id": "', _ID_TEXT, '"')

    def call(tool: ToolSpec) -> Expression:
        head = f'{{"name": {quote(tool.name)}, "arguments": '
        return row(head, json_arguments(tool), Maybe(call_id), "}")

    calls = repeat(one_of(tools, call), ", ", options)
    return row(BLANK_LINES, _START, Maybe(Literal(" ")), "[", calls, "]")


FAMILY = Family(
    calls=(
        CallFormat("mistral", (_START,), "", _make_reader, grammar=_grammar, signs=sign(_START)),
    ),
    thoughts=(ThoughtFormat("mistral", "[THINK]", "[/THINK]", signs=sign("[THINK]")),),
)
