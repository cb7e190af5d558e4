"""Llama 3 and 4: JSON or Python, which a mark may precede."""

from collections.abc import Sequence
from functools import partial

from node.dialect.bare_calls import BareCallReader
from node.dialect.call_grammar import GrammarOptions, one_of, repeat
from node.dialect.formats import CallFormat, Family, Rank, TemplateSign
from node.dialect.json_calls import json_call
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression


def _grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    """Write objects without any mark."""
    return repeat(one_of(tools, partial(json_call, key="parameters")), "; ", options)


FAMILY = Family(
    calls=(
        CallFormat(
            "llama4",
            ("<|python_start|>",),
            "<|python_end|>",
            BareCallReader,
            make_bare_reader=BareCallReader,
            grammar=_grammar,
            signs=(
                TemplateSign(("<|python_start|>",), Rank.BASE),
                TemplateSign(("<|header_start|>",), Rank.BASE),
            ),
        ),
        CallFormat(
            "llama",
            ("<|python_tag|>",),
            "<|eom_id|>",
            BareCallReader,
            make_bare_reader=BareCallReader,
            grammar=_grammar,
            signs=(
                TemplateSign(("<|python_tag|>",), Rank.BASE),
                TemplateSign(("<|start_header_id|>", "parameters"), Rank.BASE),
            ),
        ),
    ),
)
