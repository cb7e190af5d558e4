"""Gemma 4 and FunctionGemma: `call:NAME{key:value}`; Gemma 3: JSON or Python, in a code block."""

from node.dialect.bare_calls import BareCallReader
from node.dialect.brace_calls import brace_format
from node.dialect.formats import CallFormat, Family, Rank, ThoughtFormat, sign
from node.dialect.python_calls import python_grammar

FAMILY = Family(
    calls=(
        brace_format(
            "gemma4",
            "<|tool_call>",
            '<|"|>',
            "<tool_call|>",
            sign("<|tool_call>", "<tool_call|>"),
        ),
        brace_format(
            "function_gemma",
            "<start_function_call>",
            "<escape>",
            "<end_function_call>",
            sign("<start_function_call>"),
        ),
        CallFormat(
            "gemma",
            ("```tool_code",),
            "```",
            BareCallReader,
            make_bare_reader=BareCallReader,
            grammar=python_grammar("```tool_code\n", "\n```", is_list=False),
            signs=sign("tool_code", rank=Rank.WORD),
        ),
    ),
    thoughts=(
        ThoughtFormat(
            "gemma4",
            "<|channel>thought",
            "<channel|>",
            signs=sign("<|channel>"),
            spacing=("\n", "", ""),
        ),
    ),
)
