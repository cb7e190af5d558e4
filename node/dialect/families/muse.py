"""Muse Spark: tagged arguments, all calls in one section."""

import re

from node.dialect.formats import Family, sign
from node.dialect.tag_calls import TagFormat, tag_format

_TAGS = TagFormat(
    start="<atem:function_calls>",
    call='<atem:invoke name="NAME">',
    call_pattern=re.compile(r"<atem:invoke\b[^>]*?\bname=\"(?P<name>[^\"]+)\">"),
    argument=('<atem:parameter name="KEY">',),
    argument_pattern=re.compile(r"<atem:parameter\b[^>]*?\bname=\"(?P<key>[^\"]+)\"[^>]*>"),
    argument_end="</atem:parameter>",
    call_end="</atem:invoke>",
    end="</atem:function_calls>",
    has_lines=False,
    guesses=True,
    shares_section=True,
)

FAMILY = Family(calls=(tag_format("muse_spark", _TAGS, sign("<atem:function_calls>")),))
