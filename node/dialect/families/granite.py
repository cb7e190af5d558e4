"""Granite 3: a JSON list of calls after a mark, up to the answer's end."""

from node.dialect.formats import Family, Rank, sign
from node.dialect.json_calls import json_list_format

FAMILY = Family(
    calls=(
        json_list_format("granite", "<|tool_call|>", "", sign("<|tool_call|>", rank=Rank.SHARED)),
    )
)
