r"""Recursive rules of a text, in the form in which the router sends them to a node.

One rule to a line, `r0` first, of regular expressions, texts that are empty, and other rules:

    r0: r1 (/[+*]/ r1)*
    r1: /[0-9]+/ | /\(/ r0 /\)/
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fabric.limits import TEXT_RULES_CHARS_MAX

START: Final = "r0"
_LINE: Final = re.compile(r"(r\d+): (.+)")
_PART: Final = re.compile(
    r"""/(?:[^/\\\n]|\\[^\n])+/|r\d+|[ ()|?*+]|""|\{\d+(?:,\d*)?\}""", re.ASCII
)
_UNSPELLED: Final = re.compile(r"\\.|/|\n", re.DOTALL)
_SPELLED: Final = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


@dataclass(frozen=True, slots=True)
class ToolText:
    """Rules for the text that a custom tool is given."""

    tool: str
    rules: str


def regex_part(regex: str) -> str:
    """Spell a regular expression as a part of a rule."""
    return "/" + _UNSPELLED.sub(lambda m: _SPELLED.get(m[0], m[0]), regex) + "/"


def respelled_rules(rules: str, name: str, spell: Callable[[str], str]) -> list[str]:
    """Return the rules, their names prefixed by `name` and their expressions rewritten by `spell`.

    Raise ValueError for invalid rules, and for rules that no finite text matches.
    """
    bodies = _read(rules)
    if not _ends(bodies):
        message = "no finite text matches the grammar's rules"
        raise ValueError(message)

    def spelled(part: str) -> str:
        if part.startswith("/"):
            return regex_part(spell(part[1:-1].replace("\\/", "/")))
        return f"{name}_{part}" if part in bodies else part

    return [f"{name}_{rule}: {' '.join(map(spelled, body))}" for rule, body in bodies.items()]


def _read(rules: str) -> dict[str, list[str]]:
    """Return the parts of each rule."""
    bodies: dict[str, list[str]] = {}
    if len(rules) <= TEXT_RULES_CHARS_MAX:
        for line in rules.split("\n"):
            found = _LINE.fullmatch(line)
            parts = _PART.findall(found[2]) if found is not None else []
            if found is None or "".join(parts) != found[2]:
                break
            bodies[found[1]] = [part for part in parts if part != " "]
        else:
            named = {part for body in bodies.values() for part in body if part[0] == "r"}
            if START in bodies and named <= bodies.keys():
                return bodies
    message = "the rules of a text are invalid"
    raise ValueError(message)


def _ends(bodies: dict[str, list[str]]) -> bool:
    """Return whether the first rule matches a finite text."""
    ending: set[str] = set()
    is_new = True
    while is_new and START not in ending:
        found = {
            rule for rule in bodies if rule not in ending and _Way(bodies[rule], ending).ends()
        }
        is_new = bool(found)
        ending |= found
    return START in ending


@dataclass(slots=True)
class _Way:
    """Reader of a rule's parts; the rules in `ending` are known to match finite texts."""

    parts: list[str]
    ending: set[str]
    _at: int = 0

    def ends(self) -> bool:
        """Return whether an alternative up to a closing bracket matches a finite text."""
        found, row = False, True
        while self._at < len(self.parts) and self.parts[self._at] != ")":
            part = self.parts[self._at]
            self._at += 1
            if part == "|":
                found, row = found or row, True
            else:
                row = self._repeated(part) and row
        return found or row

    def _repeated(self, part: str) -> bool:
        if part == "(":
            ends = self.ends()
            self._at += 1
        else:
            ends = part[0] != "r" or part in self.ending
        sign = self.parts[self._at] if self._at < len(self.parts) else ""
        if sign[:1] in ("?", "*", "+", "{"):
            self._at += 1
        return ends or sign in ("?", "*") or sign.startswith(("{0,", "{0}"))
