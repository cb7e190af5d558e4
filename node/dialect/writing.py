"""How calls are written, for answers that must be some: what formats build their grammars of."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from json import dumps

from node.dialect.offered_tool import OfferedTool
from node.grammar.expression import (
    JSON_ESCAPES,
    Expression,
    Json,
    Many,
    Maybe,
    OneOf,
    Pattern,
    TextRules,
    row,
)
from node.grammar.respelled import TextSpelling, json_text


@dataclass(frozen=True, slots=True)
class Style:
    """What is known of a model, and asked of an answer."""

    template: str = ""
    marks: Collection[str] = ()  # tokens of the tokenizer's own
    ends: Collection[str] = ()  # those that end an answer
    takes_one: bool = False
    must_call: bool = True  # False: what is written may be something else


Write = Callable[[Sequence[OfferedTool], Style], Expression]
WriteCall = Callable[[OfferedTool], Expression]
SPACE = Maybe(Pattern("[ \n]"))  # as people and models write JSON
BLANK_LINES = Maybe(Pattern("\n{1,2}"))  # behind a thought, say


def repeated(call: Expression, between: str, style: Style) -> Expression:
    """Return one call or, unless only one is taken, several."""
    return call if style.takes_one else row(call, Many(row(between, call)))


def one_of(tools: Sequence[OfferedTool], write: WriteCall) -> Expression:
    """Return a call of any of the tools."""
    return OneOf(tuple(write(tool) for tool in tools))


def arguments(tool: OfferedTool) -> Expression:
    """Return the object that a tool is given."""
    if not tool.rules:
        return Json(tool.parameters, tool.is_strict)
    (key,) = tool.parameters["properties"]
    return row("{", SPACE, f"{quoted(key)}:", SPACE, json_rules(tool), SPACE, "}")


def json_rules(tool: OfferedTool, escapes: str = JSON_ESCAPES) -> Expression:
    """Return the text that a tool is given, as JSON has it."""
    return row('"', TextRules(tool.rules, json_text(escapes)), '"')


def raw_rules(tool: OfferedTool, end: str, never: str) -> Expression:
    """Return that text as it stands, and then what ends it; it has no character of `never`."""
    return row(TextRules(tool.rules, TextSpelling(never=never)), end)


def quoted(text: str) -> str:
    """Return a text as JSON, as templates print it."""
    return dumps(text, ensure_ascii=False)
