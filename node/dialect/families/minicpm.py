"""MiniCPM 5: tagged arguments, with CDATA around texts that cannot stand plain."""

import re

from node.dialect.formats import Family, sign
from node.dialect.tag_calls import TagFormat, tag_format

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_PARTIAL_CDATA = "|".join(re.escape(_CDATA[:size]) for size in range(len(_CDATA)))
_TAGS = TagFormat(
    start="",
    call='<function name="NAME">',
    call_pattern=re.compile(r"<function name=[\"']?(?P<name>[^>\"'\s]+)[\"']?\s*>"),
    argument=('<param name="KEY">',),
    # Matches only once it is known whether CDATA follows.
    argument_pattern=re.compile(
        r"<param name=[\"']?(?P<key>[^>\"']+)[\"']?\s*>"
        rf"(?:\s*(?P<opening>{re.escape(_CDATA)})|(?!\s*(?:{_PARTIAL_CDATA})\Z))"
    ),
    argument_end="</param>",
    call_end="",
    end="</function>",
    has_lines=False,
    other_ends={_CDATA: _CDATA_END},
    quotes=(_CDATA, _CDATA_END),
    quoted_chars="<&\n",
)

FAMILY = Family(
    calls=(
        tag_format(
            "minicpm5",
            _TAGS,
            sign('<function name="', '<param name="'),
            inner_start="<function name=",
        ),
    )
)
