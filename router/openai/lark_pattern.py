"""A grammar in Lark's notation as one regular expression or, if it is recursive, as rules.

A custom tool's text is part of its call, in JSON or between tags, depending on the family of
models: a regular expression can be enforced in each of these formats.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from fabric.limits import PATTERN_CHARS_MAX, RULES_CHARS_MAX, TEXT_RULES_CHARS_MAX
from fabric.turn.answer_constraints import START, regex_part

_TOKEN: Final = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<define>[?!]{0,2}[A-Za-z_][\w-]*(?:\.-?\d+)?\s*:(?!:))
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<order>%\w+)
    |(?P<number>\d+)
    |(?P<sign>\.\.|->|[|()\[\]{}?*+~,.])""",
    re.VERBOSE,
)
_COMMON: Final = {
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "CPP_COMMENT": "//[^\n]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SH_COMMENT": "#[^\n]*",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|"
    r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_Expansion = Callable[[], str]
_NOTHING: Final = '""'


class NoPatternError(ValueError):
    """Valid grammar without a regular expression, or without one that is short enough."""


def lark_pattern(definition: str) -> str:
    """Return the expression of the whole text; raise ValueError if there is none."""
    _check_size(definition)
    try:
        return _Grammar(_tokens(definition)).pattern()
    except RecursionError:
        message = "the grammar is nested too deeply"
        raise ValueError(message) from None


def regex_rules(regex: str) -> str:
    """Return the rules of one expression; raise ValueError if it is too long."""
    _check_size(regex)
    return f"{START}: {regex_part(regex) if regex else _NOTHING}"


def _check_size(definition: str) -> None:
    if len(definition) > RULES_CHARS_MAX:
        message = f"it has more than {RULES_CHARS_MAX} characters"
        raise ValueError(message)


def lark_rules(definition: str) -> str:
    """Return the rules of the whole text; raise ValueError if there are none."""
    _check_size(definition)
    try:
        return _Grammar(_tokens(definition), as_rules=True).rules()
    except RecursionError:
        message = "the grammar is nested too deeply"
        raise ValueError(message) from None


def _tokens(definition: str) -> list[tuple[str, str]]:
    tokens = []
    at = 0
    while at < len(definition):
        match = _TOKEN.match(definition, at)
        if match is None:
            line = definition.count("\n", 0, at) + 1
            message = f"line {line} of the grammar cannot be parsed"
            raise ValueError(message)
        if match.lastgroup != "skip":
            tokens.append((match.lastgroup or "", match[0]))
        at = match.end()
    return tokens


@dataclass(slots=True)
class _Grammar:
    """Parser of a grammar, and its expansion into one expression or into rules."""

    tokens: list[tuple[str, str]]
    as_rules: bool = False
    _at: int = 0
    _rules: dict[str, _Expansion] = field(default_factory=dict)
    _ignored: list[_Expansion] = field(default_factory=list)
    _expanded: dict[str, str] = field(default_factory=dict)
    _expanding: list[str] = field(default_factory=list)
    _numbers: dict[str, str] = field(default_factory=dict)
    _is_terminal: bool = False  # the current definition is a terminal: nothing is ignored within it

    def pattern(self) -> str:
        self._read()
        return self._expand_rule("start")

    def rules(self) -> str:
        """Return all rules that the first one refers to."""
        self._read()
        self._number_of("start")
        lines: list[str] = []
        size = 0
        while len(lines) < len(self._numbers):
            name = list(self._numbers)[len(lines)]
            lines.append(f"{self._numbers[name]}: {self._rules[name]() or _NOTHING}")
            size += len(lines[-1]) + 1
            if size > TEXT_RULES_CHARS_MAX:
                message = f"its rules have more than {TEXT_RULES_CHARS_MAX} characters"
                raise ValueError(message)
        return "\n".join(lines)

    def _number_of(self, name: str) -> str:
        """Return the number of a rule, in the order of use."""
        if name not in self._rules:
            message = f"the grammar has no rule {name[:64]!r}"
            raise ValueError(message)
        return self._numbers.setdefault(name, f"r{len(self._numbers)}")

    def _read(self) -> None:
        while self._at < len(self.tokens):
            kind, text = self._take()
            if kind == "define":
                name = text.rstrip(": \t\r\n").lstrip("?!").partition(".")[0]
                self._is_terminal = name.lstrip("_").isupper()
                self._rules[name] = self._either()
            elif text == "%ignore":
                self._is_terminal = True
                self._ignored.append(self._either())
            elif text == "%import":
                self._import()
            else:
                raise self._wrong(text)
        if "start" not in self._rules:
            message = "the grammar has no rule 'start'"
            raise ValueError(message)

    def _take(self) -> tuple[str, str]:
        if self._at >= len(self.tokens):
            message = "the grammar ends too early"
            raise ValueError(message)
        self._at += 1
        return self.tokens[self._at - 1]

    def _next(self) -> str:
        return self.tokens[self._at][1] if self._at < len(self.tokens) else ""

    def _has_item(self) -> bool:
        kind = self.tokens[self._at][0] if self._at < len(self.tokens) else "end"
        return kind in ("text", "regex", "name") or self._next() in ("(", "[")

    def _wrong(self, text: str) -> ValueError:
        return ValueError(f"the grammar cannot be parsed at {text[:64]!r}")

    def _import(self) -> None:
        """Read an import of Lark's own definitions."""
        path = [self._take()[1]]
        while self._next() == ".":
            self._at += 1
            path.append(self._take()[1])
        names = [path.pop()]
        if self._next() == "(":
            path, names = [*path, *names], []
            while self._take()[1] != ")":
                names.append(self._take()[1])
        alias = None
        if self._next() == "->":
            self._at += 1
            alias = self._take()[1]
        for name in names:
            if path != ["common"] or name not in _COMMON:
                message = f"{'.'.join([*path, name])[:64]!r} cannot be imported"
                raise ValueError(message)
            self._rules[alias or name] = partial(str, _COMMON[name])

    def _either(self) -> _Expansion:
        if self._next() == "|":
            self._at += 1
        parts = [self._row()]
        while self._next() == "|":
            self._at += 1
            parts.append(self._row())
        opening = self._opening
        return lambda: f"{opening}{'|'.join(part() for part in parts)})"

    def _row(self) -> _Expansion:
        parts: list[_Expansion] = []
        while self._has_item():
            parts.append(self._repetition())
        if self._next() == "->":
            self._at += 2
        between, nothing = (" ", _NOTHING) if self._spells_rules else ("", "")
        return lambda: between.join(part() for part in parts) or nothing

    def _repetition(self) -> _Expansion:
        part, opening = self._one(), self._opening
        if self._next() in ("?", "*", "+"):
            sign = self._take()[1]
            return lambda: f"{opening}{part()}){sign}"
        if self._next() in ("~", "{"):
            counts = self._counts()
            return lambda: f"{opening}{part()}){{{counts}}}"
        return part

    @property
    def _spells_rules(self) -> bool:
        return self.as_rules and not self._is_terminal

    @property
    def _opening(self) -> str:
        return "(" if self._spells_rules else "(?:"

    def _counts(self) -> str:
        """Read `~2`, `~2..3`, `{2}` or `{2,3}`."""
        is_braced = self._take()[1] == "{"
        counts = ""
        while self._at < len(self.tokens):
            kind, text = self.tokens[self._at]
            if kind != "number" and text not in ((",",) if is_braced else ("..",)):
                break
            counts += "," if kind == "sign" else text
            self._at += 1
        if not counts or (is_braced and self._take()[1] != "}"):
            message = "the grammar has a template or an invalid count"
            raise ValueError(message)
        return counts

    def _one(self) -> _Expansion:
        kind, text = self._take()
        if text in ("(", "["):
            inner, opening = self._either(), self._opening
            if self._next() != (")" if text == "(" else "]"):
                raise self._wrong(self._next() or text)
            self._at += 1
            return (lambda: f"{opening}{inner()})?") if text == "[" else inner
        if kind == "name" and not text.lstrip("_").isupper():
            return lambda: self._number_of(text) if self.as_rules else self._expand_rule(text)
        return self._leaf(kind, text)

    def _leaf(self, kind: str, text: str) -> _Expansion:
        is_terminal, spells_rules = self._is_terminal, self._spells_rules
        if kind == "text" and self._next() == "..":
            self._at += 1
            ends = (_literal(text), _literal(self._take()[1]))
            text = f"[{'-'.join(map(re.escape, ends))}]"
        elif kind == "text":
            is_any_case = text.endswith("i")
            text = re.escape(_literal(text.removesuffix("i")))
            text = f"(?i:{text})" if is_any_case else text
        elif kind == "regex":
            text = _regex(text)

        def expanded() -> str:
            spelled = self._expand_rule(text) if kind == "name" else text
            whole = spelled if is_terminal else f"{spelled}{self._between()}"
            if not spells_rules:
                return whole
            return regex_part(whole) if whole else _NOTHING

        return expanded

    def _between(self) -> str:
        if not self._ignored:
            return ""
        return f"(?:{'|'.join(expand() for expand in self._ignored)})*"

    def _expand_rule(self, name: str) -> str:
        if name in self._expanded:
            return self._expanded[name]
        if name not in self._rules:
            message = f"the grammar has no rule {name[:64]!r}"
            raise ValueError(message)
        if name in self._expanding:
            message = f"the rule {name[:64]!r} refers to itself"
            raise NoPatternError(message)
        self._expanding.append(name)
        expansion = self._rules[name]()
        self._expanding.pop()
        if len(expansion) > PATTERN_CHARS_MAX:
            message = (
                f"as one expression {name[:64]!r} has more than {PATTERN_CHARS_MAX} characters"
            )
            raise NoPatternError(message)
        self._expanded[name] = expansion
        return expansion


def _literal(text: str) -> str:
    try:
        literal = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        literal = None
    if not isinstance(literal, str):
        message = f"the grammar cannot be parsed at {text[:64]!r}"
        raise ValueError(message)  # noqa: TRY004 - of a client's text
    return literal


def _regex(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    kept = "".join(flag for flag in flags if flag in "ims")
    return f"(?{kept}:{body})".replace(r"\/", "/")
