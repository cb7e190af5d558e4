"""Phi-4: a JSON list of calls between marks."""

from node.dialect.formats import Family, Rank, TemplateSign
from node.dialect.json_calls import json_list_format

_SIGNS = (
    TemplateSign(("<|tool_call|>", "<|/tool_call|>"), Rank.COMBINATION),
    TemplateSign(("<|tool|>", "<|/tool|>"), Rank.COMBINATION),
)

FAMILY = Family(calls=(json_list_format("phi4", "<|tool_call|>", "<|/tool_call|>", _SIGNS),))
