"""Apertus: a list of objects, each with the tool's name as the key of its arguments."""

from collections.abc import Sequence

from node.dialect.call_grammar import (
    BLANK_LINES,
    GrammarOptions,
    json_arguments,
    one_of,
    quote,
    repeat,
    require_plain_name,
)
from node.dialect.formats import CallFormat, Family, ThoughtFormat, sign
from node.dialect.json_calls import header_reader
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression, row

_START, _END = "<|tools_prefix|>", "<|tools_suffix|>"


def _grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    def call(tool: ToolSpec) -> Expression:
        require_plain_name(tool)
        return row(f"{{{quote(tool.name)}: ", json_arguments(tool), "}")

    calls = repeat(one_of(tools, call), ", ", options)
    return row(BLANK_LINES, f"{_START}[", calls, f"]{_END}")


FAMILY = Family(
    calls=(
        CallFormat(
            "apertus",
            (_START,),
            _END,
            header_reader(
                header=r'[\s\[,{}]*"(?P<name>[\w.\-]+)"\s*:\s*(?={)',
                tail=r"[\s\]}]*",
            ),
            grammar=_grammar,
            signs=sign(_START),
        ),
    ),
    thoughts=(
        ThoughtFormat(
            "apertus", "<|inner_prefix|>", "<|inner_suffix|>", signs=sign("<|inner_prefix|>")
        ),
    ),
)
