"""The grammar of an answer of several messages that ends with a call, or may: gpt-oss's.

A call's own end ends the answer, too. Where several may come, all but the last end as thoughts do.
"""

import re
from collections.abc import Sequence

from node.dialect.harmony import CALL_END, CHANNEL, CONSTRAIN, MARKS, MESSAGE, MESSAGE_END, START
from node.dialect.offered_tool import OfferedTool
from node.dialect.writing import Style, arguments, one_of, repeated
from node.grammar.expression import Expression, Literal, Many, Maybe, OneOf, Pattern, Until, row

_NEXT = f"{MESSAGE_END}{START}assistant"
_THOUGHT = row(f"{CHANNEL}analysis{MESSAGE}", Until(_NEXT, without=MARKS))
_SPOKEN = row(f"{CHANNEL}commentary{MESSAGE}", Until(_NEXT, without=MARKS))
_TEXT = row(f"{CHANNEL}final{MESSAGE}", Pattern("(?s:.*)"))
_CODE = Maybe(row(" ", Maybe(Literal(CONSTRAIN)), "json"))


def write_harmony(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write thoughts and then calls: an answer ends with them, or with a text where it may."""

    def to(tool: OfferedTool) -> Expression:
        if re.fullmatch(r"[^\s<]+", tool.name) is None:
            tool.refuse("this model's format takes no name with a blank or '<' in it")
        return Literal(f"to=functions.{tool.name}")

    def call(tool: OfferedTool) -> Expression:
        behind = row(f"{CHANNEL}commentary ", to(tool), _CODE)
        before = row(" ", to(tool), f"{CHANNEL}commentary", _CODE)
        return row(OneOf((behind, before)), MESSAGE, arguments(tool))

    end = () if CALL_END in style.ends else (CALL_END,)
    calls = row(repeated(one_of(tools, call), _NEXT, style), *end)
    if style.must_call:
        return row(Many(_THOUGHT), calls)
    return row(Many(OneOf((_THOUGHT, _SPOKEN))), OneOf((calls, _TEXT)))
