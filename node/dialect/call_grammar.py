"""Parts of the grammars that enforce calls, for all formats."""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from json import dumps

from node.dialect.tool_schema import ToolSpec
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
from node.grammar.regexes import TextEscaping, json_escaping


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """Facts about the model, and the request's choice of calls."""

    template: str = ""
    special_texts: Collection[str] = ()  # texts of the tokenizer's special tokens
    end_texts: Collection[str] = ()  # special texts that end an answer
    takes_one: bool = False
    must_call: bool = True


CallGrammar = Callable[[Sequence[ToolSpec], GrammarOptions], Expression]
_SPACE = Maybe(Pattern("[ \n]"))  # as people and models write JSON
BLANK_LINES = Maybe(Pattern("\n{1,2}"))  # after a thought, for example


def repeat(call: Expression, between: str, options: GrammarOptions) -> Expression:
    """Return one call or, unless only one is allowed, several."""
    return call if options.takes_one else row(call, Many(row(between, call)))


def one_of(tools: Sequence[ToolSpec], call: Callable[[ToolSpec], Expression]) -> Expression:
    """Return a call of any of the tools."""
    return OneOf(tuple(call(tool) for tool in tools))


def json_arguments(tool: ToolSpec) -> Expression:
    """Return the JSON object of a call's arguments."""
    if not tool.rules:
        return Json(tool.parameters, tool.is_strict)
    (key,) = tool.parameters["properties"]
    return row("{", _SPACE, f"{quote(key)}:", _SPACE, rules_string(tool), _SPACE, "}")


def rules_string(tool: ToolSpec, escapes: str = JSON_ESCAPES) -> Expression:
    """Return the JSON string of a text that follows the tool's rules."""
    return row('"', TextRules(tool.rules, json_escaping(escapes)), '"')


def rules_text(tool: ToolSpec, end: str, forbidden: str) -> Expression:
    """Return an unquoted text that follows the tool's rules, then `end`.

    The text has none of the `forbidden` characters.
    """
    return row(TextRules(tool.rules, TextEscaping(forbidden=forbidden)), end)


def quote(text: str) -> str:
    """Return a text as JSON, as templates print it."""
    return dumps(text, ensure_ascii=False)


def require_plain_name(tool: ToolSpec, pattern: str = r"[\w.\-]+") -> None:
    """Raise RejectedError for a tool with a name that this format cannot express."""
    if re.fullmatch(pattern, tool.name, re.ASCII) is None:
        tool.refuse("its name must consist of letters, digits, '_', '-' and '.' for this model")
