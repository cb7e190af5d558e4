"""MiniMax M2: tagged arguments, all calls in one section; M3: elements, each tag marked."""

import re

from node.dialect.element_calls import NAME, ElementCallReader
from node.dialect.formats import Family, Rank, TemplateSign, ThoughtFormat, sign
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

_SEPARATOR = "]<]minimax[>["
_M3 = TagFormat(
    start=f"{_SEPARATOR}<tool_call>",
    call=f'{_SEPARATOR}<invoke name="NAME">',
    call_pattern=re.compile(
        rf"(?:{re.escape(_SEPARATOR)})?<invoke name=[\"\']?(?P<name>[^>\"\']+)[\"\']?>"
    ),
    argument=(f"{_SEPARATOR}<KEY>",),
    argument_pattern=re.compile(rf"(?:{re.escape(_SEPARATOR)})?<(?P<key>{NAME})>"),
    argument_end=f"{_SEPARATOR}</KEY>",
    call_end="</invoke>",
    end=f"{_SEPARATOR}</tool_call>",
    has_lines=False,
    guesses=True,
    loose_end="</KEY>",
    after_loose_end=_SEPARATOR,
    written_call_end=f"{_SEPARATOR}</invoke>",
    shares_section=True,
)
_THINK_SIGNS = (TemplateSign(("mm:think",)), TemplateSign((_SEPARATOR,), Rank.SHARED))

FAMILY = Family(
    calls=(
        tag_format("minimax_m2", _TAGS, sign("<minimax:tool_call>")),
        tag_format("minimax_m3", _M3, sign(_SEPARATOR), reader=ElementCallReader),
    ),
    thoughts=(ThoughtFormat("minimax_m3", "<mm:think>", "</mm:think>", signs=_THINK_SIGNS),),
)
