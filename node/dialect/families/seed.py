"""Seed-OSS: Qwen3-Coder's format between marks of its own, without lines around values."""

from dataclasses import replace

from node.dialect.families.qwen import CODER_TAGS
from node.dialect.formats import Family, ThoughtFormat, sign
from node.dialect.tag_calls import tag_format

_TAGS = replace(
    CODER_TAGS,
    start="<seed:tool_call>",
    end="</seed:tool_call>",
    argument=("<parameter=KEY>",),
    has_lines=False,
    line_end="",
)

FAMILY = Family(
    calls=(tag_format("seed_oss", _TAGS, sign("<seed:tool_call>")),),
    thoughts=(ThoughtFormat("seed", "<seed:think>", "</seed:think>", signs=sign("<seed:think>")),),
)
