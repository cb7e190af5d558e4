"""Command A and Command R: a list of JSON objects that name the tool `tool_name`."""

from collections.abc import Sequence
from functools import partial

from node.dialect.call_grammar import (
    BLANK_LINES,
    GrammarOptions,
    json_arguments,
    one_of,
    quote,
    repeat,
)
from node.dialect.formats import CallFormat, Family, ThoughtFormat, sign
from node.dialect.json_calls import JsonCallReader, json_call
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression, Pattern, row


def _command_a(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    number = row('"tool_call_id": "', Pattern("[0-9]{1,3}"), '", ')
    call = partial(json_call, name="tool_name", key="parameters", first=number)
    calls = repeat(one_of(tools, call), ",\n    ", options)
    return row(BLANK_LINES, "<|START_ACTION|>[\n    ", calls, "\n]<|END_ACTION|>")


def _command_r(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    def call(tool: ToolSpec) -> Expression:
        head = f'    {{\n        "tool_name": {quote(tool.name)},\n        "parameters": '
        return row(head, json_arguments(tool), "\n    }")

    calls = repeat(one_of(tools, call), ",\n", options)
    return row(BLANK_LINES, "Action: ```json\n[\n", calls, "\n]```")


FAMILY = Family(
    calls=(
        CallFormat(
            "command",
            ("<|START_ACTION|>",),
            "<|END_ACTION|>",
            JsonCallReader,
            grammar=_command_a,
            signs=sign("<|START_ACTION|>"),
        ),
        CallFormat(
            "command_r",
            ("Action: ```json",),
            "```",
            JsonCallReader,
            grammar=_command_r,
            signs=sign("Action: ```json"),
        ),
    ),
    thoughts=(
        ThoughtFormat(
            "command", "<|START_THINKING|>", "<|END_THINKING|>", signs=sign("<|START_THINKING|>")
        ),
    ),
    hidden_marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
