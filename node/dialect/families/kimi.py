"""Kimi K2: an id with the tool's name before JSON; K3: tagged arguments that state their type."""

import re
from collections.abc import Sequence

from node.dialect.call_grammar import (
    BLANK_LINES,
    GrammarOptions,
    json_arguments,
    one_of,
    repeat,
    require_plain_name,
)
from node.dialect.formats import CallFormat, Family, sign
from node.dialect.json_calls import header_reader
from node.dialect.tag_calls import TagFormat, tag_format
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression, Literal, Maybe, Pattern, row

_START, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_K3 = TagFormat(
    start="<|open|>tools<|sep|>",
    call='<|open|>call tool="NAME" index="INDEX"<|sep|>',
    call_pattern=re.compile(r"<\|open\|>call tool=\"(?P<name>[^\"]+)\"[^<]*<\|sep\|>"),
    argument=('<|open|>argument key="KEY" type="TYPE"<|sep|>',),
    argument_pattern=re.compile(
        r"<\|open\|>(?:argument key=\"(?P<key>[^\"]*)\"(?: type=\"(?P<is_text>\w+)\")?|"
        r"(?P<opening>json)\b)[^<]*<\|sep\|>"
    ),
    argument_end="<|close|>argument<|sep|>",
    call_end="<|close|>call<|sep|>",
    end="<|close|>tools<|sep|>",
    has_lines=False,
    guesses=True,
    has_entities=True,
    other_ends={"json": "<|close|>json<|sep|>"},
    shares_section=True,
    between="",
    # A text may come first, and be empty; the prompt may have opened it.
    before=Maybe(row(Maybe(Literal("<|open|>response<|sep|>")), "<|close|>response<|sep|>")),
    after=Maybe(Literal("<|close|>message<|sep|>")),
)


def _grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    def call(tool: ToolSpec) -> Expression:
        require_plain_name(tool, r"(?!functions\.)[\w.\-]+")
        mark = "<|tool_call_argument_begin|>"
        return row(f"functions.{tool.name}:", Pattern("[0-9]{1,3}"), mark, json_arguments(tool))

    marked = row("<|tool_call_begin|>", one_of(tools, call), "<|tool_call_end|>")
    return row(BLANK_LINES, _START, repeat(marked, "", options), _END)


FAMILY = Family(
    calls=(
        CallFormat(
            "kimi_k2",
            (_START,),
            _END,
            header_reader(
                header=r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*"
                r"(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*"
                r"<\|tool_call_argument_begin\|>\s*(?=\{)",
                tail=r"\s*(?:<\|tool_call_end\|>)?\s*",
            ),
            grammar=_grammar,
            signs=sign(_START),
        ),
        tag_format("kimi_k3", _K3),
    ),
)
