"""Grammars of calls that are JSON, or have their arguments in JSON behind a name."""

import re
from collections.abc import Sequence
from functools import partial

from node.dialect.offered_tool import OfferedTool
from node.dialect.writing import BLANK_LINES, Style, Write, arguments, one_of, quoted, repeated
from node.grammar.expression import Expression, Literal, Maybe, Pattern, row

_MISTRAL_ID = Pattern("[0-9A-Za-z]{9}")


def json_call(
    tool: OfferedTool, name: str = "name", key: str = "arguments", more: Expression | None = None
) -> Expression:
    """Return an object with a name and arguments; `more` stands behind its first brace."""
    head: tuple[Expression | str, ...] = ("{",) if more is None else ("{", more)
    return row(*head, f'"{name}": {quoted(tool.name)}, "{key}": ', arguments(tool), "}")


def write_json(start: str, end: str) -> Write:
    """Return how calls are written that each stand between marks."""

    def write(tools: Sequence[OfferedTool], style: Style) -> Expression:
        line = Maybe(Literal("\n"))
        call = row(start, line, one_of(tools, json_call), line, end)
        return row(BLANK_LINES, repeated(call, "\n", style))

    return write


def write_list(start: str, end: str) -> Write:
    """Return how calls are written that stand in one list."""

    def write(tools: Sequence[OfferedTool], style: Style) -> Expression:
        calls = repeated(one_of(tools, json_call), ", ", style)
        return row(BLANK_LINES, start, "[", calls, "]", end)

    return write


def write_bare(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write Llama's: objects without any mark."""
    return repeated(one_of(tools, partial(json_call, key="parameters")), "; ", style)


def write_command(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write Command A's list."""
    number = row('"tool_call_id": "', Pattern("[0-9]{1,3}"), '", ')
    one = partial(json_call, name="tool_name", key="parameters", more=number)
    calls = repeated(one_of(tools, one), ",\n    ", style)
    return row(BLANK_LINES, "<|START_ACTION|>[\n    ", calls, "\n]<|END_ACTION|>")


def write_command_r(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write Command R's list, one part to a line."""

    def one(tool: OfferedTool) -> Expression:
        head = f'    {{\n        "tool_name": {quoted(tool.name)},\n        "parameters": '
        return row(head, arguments(tool), "\n    }")

    calls = repeated(one_of(tools, one), ",\n", style)
    return row(BLANK_LINES, "Action: ```json\n[\n", calls, "\n]```")


def write_mistral(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write a list, or with later tokenizers a name in front of each call's arguments."""
    if "[ARGS]" not in style.marks:
        end = row(', "id": "', _MISTRAL_ID, '"')

        def listed(tool: OfferedTool) -> Expression:
            head = f'{{"name": {quoted(tool.name)}, "arguments": '
            return row(head, arguments(tool), Maybe(end), "}")

        calls = repeated(one_of(tools, listed), ", ", style)
        return row(BLANK_LINES, "[TOOL_CALLS]", Maybe(Literal(" ")), "[", calls, "]")
    own_id: tuple[Expression, ...] = ()
    if "[CALL_ID]" in style.marks and "[CALL_ID]" in style.template:
        own_id = (Maybe(row("[CALL_ID]", _MISTRAL_ID)),)

    def headed(tool: OfferedTool) -> Expression:
        _require_name(tool, r"[\w.\-]+")
        return row(tool.name, *own_id, "[ARGS]", arguments(tool))

    call = row("[TOOL_CALLS]", one_of(tools, headed))
    return row(BLANK_LINES, repeated(call, "", style))


def write_kimi(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write ids of a name and a number in front of the arguments."""

    def one(tool: OfferedTool) -> Expression:
        _require_name(tool, r"(?!functions\.)[\w.\-]+")
        mark = "<|tool_call_argument_begin|>"
        return row(f"functions.{tool.name}:", Pattern("[0-9]{1,3}"), mark, arguments(tool))

    call = row("<|tool_call_begin|>", one_of(tools, one), "<|tool_call_end|>")
    section = ("<|tool_calls_section_begin|>", repeated(call, "", style))
    return row(BLANK_LINES, *section, "<|tool_calls_section_end|>")


def write_apertus(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write a list of objects, each with the name as the key of its arguments."""

    def one(tool: OfferedTool) -> Expression:
        _require_name(tool, r"[\w.\-]+")
        return row(f"{{{quoted(tool.name)}: ", arguments(tool), "}")

    calls = repeated(one_of(tools, one), ", ", style)
    return row(BLANK_LINES, "<|tools_prefix|>[", calls, "]<|tools_suffix|>")


def write_deepseek(tools: Sequence[OfferedTool], style: Style) -> Expression:
    """Write the name and its arguments; DeepSeek's first models put those into a block of code."""
    is_fenced = "```json" in style.template

    def one(tool: OfferedTool) -> Expression:
        _require_name(tool, r"(?!function<)[\w.\-]+")
        if is_fenced:
            head = f"function<｜tool▁sep｜>{tool.name}\n```json\n"
            return row(head, arguments(tool), "\n```")
        return row(f"{tool.name}<｜tool▁sep｜>", arguments(tool))

    call = row("<｜tool▁call▁begin｜>", one_of(tools, one), "<｜tool▁call▁end｜>")
    calls = repeated(call, "\n" if is_fenced else "", style)
    return row(BLANK_LINES, "<｜tool▁calls▁begin｜>", calls, "<｜tool▁calls▁end｜>")


def _require_name(tool: OfferedTool, pattern: str) -> None:
    if re.fullmatch(pattern, tool.name, re.ASCII) is None:
        tool.refuse("this model writes names of letters, digits, '_', '-' and '.' only")
