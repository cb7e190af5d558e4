"""DeepSeek V3, R1 and its distills: names before JSON; V3.2 and V4: tagged arguments (DSML)."""

import re
from collections.abc import Sequence

from node.dialect.call_grammar import (
    BLANK_LINES,
    GrammarOptions,
    json_arguments,
    one_of,
    repeat,
    require_plain_name,
)
from node.dialect.formats import CallFormat, Family, sign
from node.dialect.json_calls import header_reader
from node.dialect.tag_calls import TagFormat, tag_format
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import Expression, row

_START, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def _dsml(section: str, space: str = "") -> TagFormat:
    """Return the tags of one version, which differ in a section's name and a space in each tag."""
    mark = f"｜DSML｜{space}"
    return TagFormat(
        start=f"<{mark}{section}>",
        call=f'<{mark}invoke name="NAME">',
        call_pattern=re.compile(rf"<{mark}invoke name=\"(?P<name>[^\"]+)\">"),
        argument=(f'<{mark}parameter name="KEY" string="false">',),
        argument_pattern=re.compile(
            rf"<{mark}parameter name=\"(?P<key>[^\"]+)\"(?: string=\"(?P<is_text>true|false)\")?>"
        ),
        argument_end=f"</{mark}parameter>",
        call_end=f"</{mark}invoke>",
        end=f"</{mark}{section}>",
        has_lines=False,
        guesses=True,
        text_argument=(f'<{mark}parameter name="KEY" string="true">',),
        shares_section=True,
    )


def _grammar(tools: Sequence[ToolSpec], options: GrammarOptions) -> Expression:
    """Write arguments into a block of code if the template does, as the first versions did."""
    is_fenced = "```json" in options.template

    def call(tool: ToolSpec) -> Expression:
        require_plain_name(tool, r"(?!function<)[\w.\-]+")
        if is_fenced:
            head = f"function<｜tool▁sep｜>{tool.name}\n```json\n"
            return row(head, json_arguments(tool), "\n```")
        return row(f"{tool.name}<｜tool▁sep｜>", json_arguments(tool))

    marked = row("<｜tool▁call▁begin｜>", one_of(tools, call), "<｜tool▁call▁end｜>")
    calls = repeat(marked, "\n" if is_fenced else "", options)
    return row(BLANK_LINES, _START, calls, _END)


FAMILY = Family(
    calls=(
        tag_format("deepseek_v41", _dsml("calls", " "), sign("｜DSML｜", " calls>")),
        tag_format("deepseek_v4", _dsml("tool_calls"), sign("｜DSML｜", "tool_calls>")),
        tag_format("deepseek_v32", _dsml("function_calls"), sign("｜DSML｜")),
        CallFormat(
            "deepseek",
            (_START,),
            _END,
            header_reader(
                header=r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*<｜tool▁call▁begin｜>(?:"
                r"function<｜tool▁sep｜>(?P<name>[\w.\-]+)\s*```(?:json)?\s*|"
                r"(?!function<)(?P<other_name>[\w.\-]+)<｜tool▁sep｜>\s*)(?=\{)",
                tail=r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*",
            ),
            grammar=_grammar,
            signs=sign(_START),
        ),
    ),
)
