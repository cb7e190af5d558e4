"""Hunyuan: a JSON list of calls between marks."""

from node.dialect.formats import Family, Rank, sign
from node.dialect.json_calls import json_list_format

_SIGN = sign("<tool_calls>", rank=Rank.SHARED)

FAMILY = Family(calls=(json_list_format("hunyuan", "<tool_calls>", "</tool_calls>", _SIGN),))
