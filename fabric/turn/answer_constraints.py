r"""Constraints on an answer: its output format, its choice of tools, and rules of texts.

Compile time is quadratic in some parts of a grammar. Each of those has a limit, so that every
accepted grammar compiles well within a second. `source` stays text throughout, so that it has one
spelling for digests and caches, and its objects keep the order of keys that answers follow.

Recursive rules of a text, in the form in which the router sends them to a node.

One rule to a line, `r0` first, of regular expressions, texts that are empty, and other rules:

    r0: r1 (/[+*]/ r1)*
    r1: /[0-9]+/ | /\(/ r0 /\)/
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from fabric.codec import dump_json, parse_json
from fabric.errors import RejectedError
from fabric.limits import (
    CHOICES_MAX,
    GRAMMAR_BYTES_MAX,
    PATTERN_CHARS_MAX,
    RULES_CHARS_MAX,
    SCHEMA_BRANCHES_MAX,
    SCHEMA_DEPTH_MAX,
    SCHEMA_PATTERNS_MAX,
    SCHEMA_PROPERTIES_MAX,
    SCHEMA_TEXT_CHARS_MAX,
    TEXT_RULES_CHARS_MAX,
)

PARAM = "response_format"
_ENUMERATIONS = frozenset({"const", "enum", "required", "type"})


class OutputKind(StrEnum):
    """Language of `source`."""

    JSON_OBJECT = "json_object"  # any object; no source
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of the whole answer
    GRAMMAR = "grammar"  # Lark's notation
    CHOICE = "choice"  # a JSON array of texts, of which the answer is one
    TAGS = "tags"  # a JSON array of tags: text is free up to one's trigger


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Format of the whole answer after its thought.

    Where it is not `is_strict`, keywords of a schema that cannot be enforced are ignored.
    """

    kind: OutputKind
    source: str = ""
    is_strict: bool = True

    def check(self) -> None:
        """Raise RejectedError if the format exceeds a limit or is invalid."""
        size_bytes = len(self.source.encode("utf-8", "replace"))
        _require(size_bytes <= GRAMMAR_BYTES_MAX, f"over {GRAMMAR_BYTES_MAX} bytes")
        match self.kind:
            case OutputKind.JSON_SCHEMA:
                check_schema(_parse_source(self.source))
            case OutputKind.CHOICE:
                choices_of(self)
            case OutputKind.TAGS:
                tags_of(self)
            case OutputKind.REGEX | OutputKind.GRAMMAR:
                chars = len(self.source)
                _require(0 < chars <= RULES_CHARS_MAX, f"not 1 to {RULES_CHARS_MAX} characters")


def schema_format(schema: Any, *, is_strict: bool) -> OutputFormat:
    """Return a format of a JSON schema; its objects keep their order."""
    return OutputFormat(OutputKind.JSON_SCHEMA, dump_json(schema).decode(), is_strict)


@dataclass(frozen=True, slots=True)
class OutputTag:
    """A part of an answer: `begin`, then JSON of `schema`, then `end`.

    Text before it is free up to `trigger`, with which `begin` starts.
    """

    trigger: str
    begin: str
    schema: dict[str, Any]
    end: str


def choices_of(output: OutputFormat) -> tuple[str, ...]:
    """Return the texts of a choice; raise RejectedError if they are invalid."""
    texts = _parse_source(output.source)
    is_list = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    _require(is_list, "not a list of non-empty texts")
    _require(0 < len(texts) <= CHOICES_MAX, f"not 1 to {CHOICES_MAX} choices")
    _require(all(len(text) <= SCHEMA_TEXT_CHARS_MAX for text in texts), _long_text())
    return tuple(texts)


def tags_of(output: OutputFormat) -> tuple[OutputTag, ...]:
    """Return the tags; raise RejectedError if they are invalid."""
    plain = _parse_source(output.source)
    _require(isinstance(plain, list), "not a list of tags")
    _require(0 < len(plain) <= SCHEMA_BRANCHES_MAX, f"not 1 to {SCHEMA_BRANCHES_MAX} tags")
    return tuple(_tag(item) for item in plain)


def _tag(item: Any) -> OutputTag:
    names = ("trigger", "begin", "end")
    is_tag = isinstance(item, dict) and item.keys() == {*names, "schema"}
    _require(is_tag and all(isinstance(item[name], str) for name in names), "not a tag")
    _require(0 < len(item["trigger"]) <= PATTERN_CHARS_MAX, "a tag's trigger is empty or long")
    _require(item["begin"].startswith(item["trigger"]), "a tag does not begin with its trigger")
    _require(isinstance(item["schema"], dict), "a tag's schema is not an object")
    check_schema(item["schema"])
    return OutputTag(item["trigger"], item["begin"], item["schema"], item["end"])


def _parse_source(source: str) -> Any:
    try:
        return parse_json(source)
    except RejectedError as error:
        why = f"not JSON: {error.message}"
        raise _refusal(why) from None


def check_schema(schema: Any) -> None:
    """Raise RejectedError for a schema that is too large or too deep to compile."""
    _require(isinstance(schema, (dict, bool)), "not a JSON schema: an object is expected")
    level = [("", schema)]
    for _ in range(SCHEMA_DEPTH_MAX):
        level = [child for name, value in level for child in _children(name, value)]
        if not level:
            return
    why = f"nested deeper than {SCHEMA_DEPTH_MAX} levels"
    raise _refusal(why)


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Check one value of a schema by itself; yield the values inside, with their names."""
    if isinstance(value, str):
        if name in _ENUMERATIONS:
            _require(len(value) <= SCHEMA_TEXT_CHARS_MAX, _long_text())
        elif name == "pattern":
            _require(len(value) <= PATTERN_CHARS_MAX, _long_pattern())
    elif isinstance(value, list):
        most = CHOICES_MAX if name in _ENUMERATIONS else SCHEMA_BRANCHES_MAX
        _require(len(value) <= most, f"more than {most} entries in one list")
        if name == "enum" and any(isinstance(item, (dict, list)) for item in value):
            most = SCHEMA_BRANCHES_MAX
            _require(len(value) <= most, f"more than {most} objects in one list")
        yield from ((name, item) for item in value)
    elif isinstance(value, dict):
        most = SCHEMA_PATTERNS_MAX if name == "patternProperties" else SCHEMA_PROPERTIES_MAX
        _require(len(value) <= most, f"more than {most} keys in one object")
        longest = max(map(len, value), default=0)
        _require(longest <= PATTERN_CHARS_MAX, _long_pattern())
        yield from value.items()


def _long_text() -> str:
    return f"a text of more than {SCHEMA_TEXT_CHARS_MAX} characters"


def _long_pattern() -> str:
    return f"a pattern or name of more than {PATTERN_CHARS_MAX} characters"


def _require(holds: bool, why: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise _refusal(why)


def _refusal(why: str) -> RejectedError:
    return RejectedError(f"the output format is refused: {why}", code="invalid_format", param=PARAM)


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
            match = _LINE.fullmatch(line)
            parts = _PART.findall(match[2]) if match is not None else []
            if match is None or "".join(parts) != match[2]:
                break
            bodies[match[1]] = [part for part in parts if part != " "]
        else:
            referenced = {part for body in bodies.values() for part in body if part[0] == "r"}
            if START in bodies and referenced <= bodies.keys():
                return bodies
    message = "the rules of a text are invalid"
    raise ValueError(message)


def _ends(bodies: dict[str, list[str]]) -> bool:
    """Return whether the first rule matches a finite text."""
    ending: set[str] = set()
    is_new = True
    while is_new and START not in ending:
        new_ending = {
            rule for rule in bodies if rule not in ending and _Way(bodies[rule], ending).ends()
        }
        is_new = bool(new_ending)
        ending |= new_ending
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
                row = self._is_repeated(part) and row
        return found or row

    def _is_repeated(self, part: str) -> bool:
        if part == "(":
            ends = self.ends()
            self._at += 1
        else:
            ends = part[0] != "r" or part in self.ending
        sign = self.parts[self._at] if self._at < len(self.parts) else ""
        if sign[:1] in ("?", "*", "+", "{"):
            self._at += 1
        return ends or sign in ("?", "*") or sign.startswith(("{0,", "{0}"))


@dataclass(frozen=True, slots=True)
class CallChoice:
    """Tools that must be called, and tools that may be."""

    must_call: bool = False  # the answer is calls, and nothing else
    names: tuple[str, ...] = ()  # what may be called; none: every tool of the request
    strict: tuple[str, ...] = ()  # whose arguments must fit their schemas, also if optional
    takes_one: bool = False  # no more than one call
    texts: tuple[ToolText, ...] = ()  # of tools that take a text with recursive rules

    @property
    def is_bound(self) -> bool:
        """Whether a call, once it begins, is constrained."""
        return self.must_call or bool(self.names or self.strict)


ANY_CALLS = CallChoice()
