"""MiniMax M2: tagged arguments, all calls in one section."""

import re

from node.dialect.formats import Family, sign
from node.dialect.tag_calls import TagFormat, tag_format

_TAGS = TagFormat(
    start="<minimax:tool_call>",
    call='<invoke name="NAME">',
    call_pattern=re.compile(r"<invoke name=[\"']?(?P<name>[^>\"']+)[\"']?>"),
    argument=('<parameter name="KEY">',),
    argument_pattern=re.compile(r"<parameter name=[\"']?(?P<key>[^>\"']+)[\"']?>"),
    argument_end="</parameter>",
    call_end="</invoke>",
    end="</minimax:tool_call>",
    has_lines=False,
    guesses=True,
    shares_section=True,
)

FAMILY = Family(calls=(tag_format("minimax_m2", _TAGS, sign("<minimax:tool_call>")),))
