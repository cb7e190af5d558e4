"""Write an expression as a grammar in the compiler's notation."""

import json
import re
from collections.abc import Mapping

from fabric.turn.text_rules import START, respelled_rules
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
from node.grammar.json_options import json_options
from node.grammar.respelled import TextSpelling, respelled
from node.grammar.without import without as regex_without

_ANY = "/(?s:.*)/"


def lark_of(expression: Expression, special_ids: Mapping[str, int]) -> str:
    """Return the grammar; `special_ids` are the tokens that stand for no text, by what they show.

    Raise ValueError for a regular expression that is none.
    """
    spelling = _Spelling(special_ids)
    start = spelling.spell(expression)
    return "\n".join([f"start: {start}", *spelling.rules, ""])


class _Spelling:
    """Names rules; what occurs twice in the tree is one rule."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._named: dict[int, str] = {}
        self._ids = special_ids
        texts = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None

    def spell(self, expression: Expression) -> str:
        match expression:
            case Literal(text):
                return self._literal(text)
            case Row(parts):
                return " ".join(filter(None, map(self.spell, parts))) or '""'
            case Maybe(part):
                return f"({self.spell(part)})?"
            case Many(part):
                return f"({self.spell(part)})*"
        name = self._named.get(id(expression))
        if name is None:
            name = self._named[id(expression)] = f"r{len(self._named)}"
            self.rules += self._rule(name, expression)
        return name

    def _rule(self, name: str, expression: Expression) -> list[str]:
        match expression:
            case OneOf(parts):
                return [f"{name}: " + " | ".join(map(self.spell, parts))]
            case Json(schema, is_strict, escapes):
                options = json_options(is_strict=is_strict, escapes=escapes)
                return [f"{name}: %json {json.dumps({**schema, 'x-guidance': options})}"]
            case Pattern(regex):
                return [f"{name}: {name.upper()}", f"{name.upper()}: {_regex(regex)}"]
            case TextRules(rules, spelling):
                return _nested(name, rules, spelling)
            case Until(end, without, matching):
                return self._until(name, end, without, matching)
        message = f"no rule is written for {type(expression).__name__}"
        raise TypeError(message)

    def _until(
        self, name: str, end: str, without: tuple[str, ...], matching: tuple[str, ...]
    ) -> list[str]:
        """Write what is free, and ends where `end` begins.

        A token of its own ends any text. Otherwise what is free is one terminal with what ends it:
        it would go on over that.
        """
        if matching:
            free = [f"/{regex_without(word)}/" for word in without]
        else:  # one negation: the compiler's states multiply with each, and with all else
            free = [_ANY, f"~/(?s:.*)({'|'.join(map(_escaped, without))})(?s:.*)/"]
        body = "(" + " & ".join([*free, *map(_regex, matching)]) + ")"
        before, special, _ = self._cut(end)
        if special:
            text = f"{body} {_quoted(before)}" if before else body
            rest = self._literal(end[len(before) :])
            return [f"{name}: {name.upper()} {rest}", f"{name.upper()}: {text}"]
        return [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: {body} {_quoted(end)}"]

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
                parts.append(_quoted(before))
            if special:
                parts.append(f"<[{self._ids[special]}]>")
        return " ".join(parts)


def _nested(name: str, rules: str, spelling: TextSpelling) -> list[str]:
    def spell(regex: str) -> str:
        from llguidance import regex_to_lark

        return str(regex_to_lark(respelled(regex, spelling)))

    return [f"{name}: {name}_{START}", *respelled_rules(rules, name, spell)]


def _quoted(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _regex(regex: str) -> str:
    from llguidance import regex_to_lark

    if "\n" in regex:
        regex = regex.replace("\n", "\\n")
    return f"/{regex_to_lark(regex)}/"
