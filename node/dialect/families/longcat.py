"""LongCat: GLM's format with tags of its own."""

import re

from node.dialect.families.glm import CALL_PATTERN
from node.dialect.formats import Family, ThoughtFormat, sign
from node.dialect.tag_calls import TagFormat, tag_format

_TAGS = TagFormat(
    start="<longcat_tool_call>",
    call="NAME",
    call_pattern=CALL_PATTERN,
    argument=("<longcat_arg_key>KEY</longcat_arg_key>", "<longcat_arg_value>"),
    argument_pattern=re.compile(
        r"<longcat_arg_key>(?P<key>[^<]*)</longcat_arg_key>\s*<longcat_arg_value>"
    ),
    argument_end="</longcat_arg_value>",
    call_end="",
    end="</longcat_tool_call>",
    has_lines=False,
    guesses=True,
)

FAMILY = Family(
    calls=(tag_format("longcat", _TAGS, sign("<longcat_tool_call>")),),
    thoughts=(
        ThoughtFormat(
            "longcat", "<longcat_think>", "</longcat_think>", signs=sign("<longcat_think>")
        ),
    ),
)
