"""gpt-oss: several messages with headers (harmony); thoughts and calls have no other marks.

A call's end ends the answer. Where several calls may come, all but the last end as thoughts do.
"""

import re
from collections.abc import Sequence

from node.dialect.call_grammar import GrammarOptions, json_arguments, one_of, repeat
from node.dialect.formats import Family, MessageFormat, sign
from node.dialect.harmony import (
    CALL_END,
    CHANNEL,
    CONSTRAIN,
    MARKS,
    MESSAGE,
    MESSAGE_END,
    START,
    HarmonyReader,
)
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression, Literal, Many, Maybe, OneOf, Pattern, Until, row
from node.grammar.thought import ThoughtMarks

_NEXT = f"{MESSAGE_END}{START}assistant"
_THOUGHT = row(f"{CHANNEL}analysis{MESSAGE}", Until(_NEXT, without=MARKS))
_COMMENTARY = row(f"{CHANNEL}commentary{MESSAGE}", Until(_NEXT, without=MARKS))
_TEXT = row(f"{CHANNEL}final{MESSAGE}", Pattern("(?s:.*)"))
_JSON = Maybe(row(" ", Maybe(Literal(CONSTRAIN)), "json"))


def _grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    """Write thoughts, then calls or, unless a call is forced, a text."""

    def recipient(tool: ToolSpec) -> Expression:
        if re.fullmatch(r"[^\s<]+", tool.name) is None:
            tool.refuse("this model's format allows no name with a blank or '<' in it")
        return Literal(f"to=functions.{tool.name}")

    def call(tool: ToolSpec) -> Expression:
        channel_first = row(f"{CHANNEL}commentary ", recipient(tool), _JSON)
        recipient_first = row(" ", recipient(tool), f"{CHANNEL}commentary", _JSON)
        return row(OneOf((channel_first, recipient_first)), MESSAGE, json_arguments(tool))

    end = () if CALL_END in options.end_texts else (CALL_END,)
    calls = row(repeat(one_of(tools, call), _NEXT, options), *end)
    if options.must_call:
        return row(Many(_THOUGHT), calls)
    return row(Many(OneOf((_THOUGHT, _COMMENTARY))), OneOf((calls, _TEXT)))


FAMILY = Family(
    messages=MessageFormat(
        "harmony",
        HarmonyReader,
        _grammar,
        # All before the last message's header counts as thought.
        ThoughtMarks("", (f"{CHANNEL}final", MESSAGE), is_always=True, holds_calls=True),
        efforts={"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
        thought_end=f"{_NEXT}{CHANNEL}",
        other_parts=(f"final{MESSAGE}", "commentary"),
        signs=sign("<|channel|>analysis<|message|>", "<|start|>assistant"),
    ),
)
