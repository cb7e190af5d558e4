"""DeepSeek V3, R1 and its distills: names before JSON; V3.2: tagged arguments (DSML)."""

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
_DSML = TagFormat(
    start="<｜DSML｜function_calls>",
    call='<｜DSML｜invoke name="NAME">',
    call_pattern=re.compile(r"<｜DSML｜invoke name=\"(?P<name>[^\"]+)\">"),
    argument=('<｜DSML｜parameter name="KEY" string="false">',),
    argument_pattern=re.compile(
        r"<｜DSML｜parameter name=\"(?P<key>[^\"]+)\"(?: string=\"(?P<is_text>true|false)\")?>"
    ),
    argument_end="</｜DSML｜parameter>",
    call_end="</｜DSML｜invoke>",
    end="</｜DSML｜function_calls>",
    has_lines=False,
    guesses=True,
    text_argument=('<｜DSML｜parameter name="KEY" string="true">',),
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
        tag_format("deepseek_v32", _DSML, sign("<｜DSML｜")),
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
