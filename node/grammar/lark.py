"""Writer of expressions in Lark's notation, as the compiler reads it."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from fabric.turn.answer_constraints import START, respelled_rules
from node.grammar.expression import (
    Expression,
    Json,
    Literal,
    Many,
    Maybe,
    OneOf,
    Pattern,
    Row,
    TextRules,
    Until,
)
from node.grammar.reasons import client_reason
from node.grammar.regexes import TextEscaping, escape_regex, exclude_word
from node.limits import JSON_INDENT_MAX

_ANY: Final = "/(?s:.*)/"
# White space in JSON as people and models write it: on one line, or one part to a line.
_JSON_SPACE: Final = f"( |\\n[ \\t]{{0,{JSON_INDENT_MAX}}})?"


def json_options(*, is_strict: bool, escapes: str | None = None) -> Any:
    """Return the compiler's options for JSON; `escapes` may follow a backslash."""
    options: dict[str, Any] = {
        "whitespace_pattern": _JSON_SPACE,
        "lenient": not is_strict,
        # A value that fits two alternatives is then allowed.
        "coerce_one_of": not is_strict,
    }
    return options if escapes is None else {**options, "json_allowed_escapes": escapes}


def lark_grammar(lark: str) -> str:
    """Return the compiler's input for a grammar in Lark's notation."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(lark))


def write_lark(expression: Expression, special_ids: Mapping[str, int]) -> str:
    """Return an expression as a Lark grammar; `special_ids` maps special tokens to their ids.

    Raise ValueError for an invalid regular expression.
    """
    writer = _LarkWriter(special_ids)
    start = writer.write(expression)
    return "\n".join([f"start: {start}", *writer.rules, ""])


class _LarkWriter:
    """Writer that names the rules; an object that occurs twice in the tree is one rule."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._named: dict[int, str] = {}
        self._ids = special_ids
        texts = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None

    def write(self, expression: Expression) -> str:
        match expression:
            case Literal(text):
                return self._literal(text)
            case Row(parts):
                return " ".join(filter(None, map(self.write, parts))) or '""'
            case Maybe(part):
                return f"({self.write(part)})?"
            case Many(part):
                return f"({self.write(part)})*"
        name = self._named.get(id(expression))
        if name is None:
            name = self._named[id(expression)] = f"r{len(self._named)}"
            self.rules += self._rule(name, expression)
        return name

    def _rule(self, name: str, expression: Expression) -> list[str]:
        match expression:
            case OneOf(parts):
                return [f"{name}: " + " | ".join(map(self.write, parts))]
            case Json(schema, is_strict, escapes):
                options = json_options(is_strict=is_strict, escapes=escapes)
                return [f"{name}: %json {json.dumps({**schema, 'x-guidance': options})}"]
            case Pattern(regex):
                return [f"{name}: {name.upper()}", f"{name.upper()}: {_regex(regex)}"]
            case TextRules(rules, escaping):
                return _nested_rules(name, rules, escaping)
            case Until(end, without, matching):
                return self._free_text_rule(name, end, without, matching)
        message = f"there is no rule for {type(expression).__name__}"
        raise TypeError(message)

    def _free_text_rule(
        self, name: str, end: str, without: tuple[str, ...], matching: tuple[str, ...]
    ) -> list[str]:
        """Return the rule of a free text and its end.

        A special token ends any text. Otherwise text and end are one lazy terminal, as a separate
        one would match past the end.
        """
        if matching:
            free = [f"/{exclude_word(word)}/" for word in without]
        else:  # one negation: states of the compiler multiply with each
            free = [_ANY, f"~/(?s:.*)({'|'.join(map(_escape_regex, without))})(?s:.*)/"]
        body = "(" + " & ".join([*free, *map(_regex, matching)]) + ")"
        before, special, _ = self._cut(end)
        if special:
            text = f"{body} {_quote_text(before)}" if before else body
            rest = self._literal(end[len(before) :])
            return [f"{name}: {name.upper()} {rest}", f"{name.upper()}: {text}"]
        return [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: {body} {_quote_text(end)}"]

    def _cut(self, text: str) -> tuple[str, str, str]:
        if self._special is None:
            return text, "", ""
        before, *rest = self._special.split(text, maxsplit=1)
        return before, rest[0] if rest else "", rest[1] if rest else ""

    def _literal(self, text: str) -> str:
        parts = []
        while text:
            before, special, text = self._cut(text)
            if before:
                parts.append(_quote_text(before))
            if special:
                parts.append(f"<[{self._ids[special]}]>")
        return " ".join(parts)


def _nested_rules(name: str, rules: str, escaping: TextEscaping) -> list[str]:
    def escape(regex: str) -> str:
        return _compiled_regex(escape_regex(regex, escaping))

    return [f"{name}: {name}_{START}", *respelled_rules(rules, name, escape)]


def _quote_text(text: str) -> str:
    return json.dumps(text)


def _escape_regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _regex(regex: str) -> str:
    if "\n" in regex:
        regex = regex.replace("\n", "\\n")
    return f"/{_compiled_regex(regex)}/"


def _compiled_regex(regex: str) -> str:
    """Return an expression in Lark's notation; raise ValueError, in our words, if it is invalid."""
    from llguidance import regex_to_lark

    try:
        return str(regex_to_lark(regex))
    except ValueError as error:
        message = client_reason(f"invalid regex: {error}")
        raise ValueError(message) from None
