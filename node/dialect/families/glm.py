"""GLM 4.5 and later: the tool's name, then tagged keys and values."""

import re

from node.dialect.formats import Family, sign
from node.dialect.tag_calls import TagFormat, tag_format

# A name that no tag follows is a word of a text about calls.
CALL_PATTERN = re.compile(r"\A\s*(?P<name>[^\s<]+)(?=\s*<)")
_TAGS = TagFormat(
    start="<tool_call>",
    call="NAME",
    call_pattern=CALL_PATTERN,
    argument=("<arg_key>KEY</arg_key>", "<arg_value>"),
    argument_pattern=re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    argument_end="</arg_value>",
    call_end="",
    end="</tool_call>",
    has_lines=False,
    guesses=True,
)

FAMILY = Family(calls=(tag_format("glm", _TAGS, sign("<arg_key>"), aliases=("glm47", "laguna")),))
