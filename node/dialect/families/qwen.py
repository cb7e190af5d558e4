"""Qwen: JSON between marks (2.5 and 3) or tagged arguments (Qwen3-Coder, Qwen3.5); `<think>`.

Many families have taken these formats over: Hermes, SmolLM3 and Granite 4 the calls in JSON, nearly
all the thoughts.
"""

import re

from node.dialect.formats import CallFormat, Family, Rank, TemplateSign, ThoughtFormat, sign
from node.dialect.json_calls import JsonCallReader, json_grammar
from node.dialect.tag_calls import TagFormat, tag_format

CODER_TAGS = TagFormat(
    start="<tool_call>",
    call="<function=NAME>",
    call_pattern=re.compile(r"<function=(?P<name>[^>\s]+)>"),
    argument=("<parameter=KEY>\n",),
    argument_pattern=re.compile(r"<parameter=(?P<key>[^>]+)>"),
    argument_end="</parameter>",
    call_end="</function>",
    end="</tool_call>",
    line_end="\n",
)

FAMILY = Family(
    calls=(
        tag_format(
            "qwen3_coder",
            CODER_TAGS,
            sign("<tool_call>", "<function=", rank=Rank.COMBINATION),
            inner_start="<function=",
        ),
        CallFormat(
            "json",
            ("<tool_call>",),
            "</tool_call>",
            JsonCallReader,
            grammar=json_grammar("<tool_call>", "</tool_call>"),
            signs=sign("<tool_call>", rank=Rank.COMMON),
            aliases=("json_tools", "hermes"),
        ),
    ),
    thoughts=(
        ThoughtFormat(
            "think",
            "<think>",
            "</think>",
            signs=(
                TemplateSign(("<think>",), Rank.COMMON),
                TemplateSign(("</think>",), Rank.COMMON),
            ),
            spacing=("\n", "\n", "\n\n"),
        ),
    ),
)
