"""Reasons why a format cannot be enforced, in words for clients instead of the compiler's.

The compiler's errors name its own parts and options, and quote the grammar that was generated.
"""

import re
from collections.abc import Callable
from typing import Final

_Reason = str | Callable[[re.Match[str]], str]
_PLACE: Final = re.compile(r"(?:at )?(\d+)\((\d+)\):")
_QUOTED_LINE: Final = re.compile(r" \d+ \| ")  # start of the quoted grammar after an error
_WRITTEN_PLACE: Final = re.compile(r"\bline \d+, column \d+: ")
_NO_VALUE: Final = "no value fits the schema"
_TOO_MUCH: Final = "it allows too much at one place: use fewer optional properties or repetitions"


def _keywords(match: re.Match[str]) -> str:
    names = ", ".join(re.findall(r'"([^"]*)"', match[1]))
    return f"keywords that are not supported: {names}"


def _regex(match: re.Match[str]) -> str:
    detail = next((words for term, words in _REGEX_DETAILS if term in match.string), "")
    return f"a regular expression is invalid{detail and f': {detail}'}"


_REGEX_DETAILS: Final = (
    ("look-around", "look-ahead and look-behind are not supported"),
    ("lookarounds", "anchors and word boundaries within it are not supported"),
    ("backreferences", "references to groups are not supported"),
    ("unclosed group", "a group is not closed"),
    ("unopened group", "a group is closed that was not opened"),
    ("unclosed character class", "a character class is not closed"),
    ("unclosed counted repetition", "a repetition count is not closed"),
    ("repetition operator missing", "nothing precedes a repetition"),
    ("repetition count range", "the bounds of a repetition are in the wrong order"),
    ("character class range", "the ends of a character range are in the wrong order"),
    ("Unicode property", "a Unicode property is unknown"),
    ("unrecognized escape", "an escape is unknown"),
    ("flag", "a flag is unknown or incomplete"),
    ("capture group name", "the name of a group is invalid"),
)
# Patterns of the compiler's errors, in the order of trial, and what they mean.
_MEANINGS: Final[tuple[tuple[str, _Reason], ...]] = (
    (r"Unimplemented keys: \[(.*)\]", _keywords),
    ("oneOf constraints", "alternatives of `oneOf` overlap: use `anyOf`, or exclude each other"),
    (r"Unknown format: (.{1,64})", lambda m: f"the string format {m[1]!r} is not supported"),
    ("NoExtensionBias", "a rule or `$ref` leads back to itself, so it allows no value"),
    (r"Pointer '(.{1,100}?)'", lambda m: f"`$ref` points to {m[1]!r}, which the schema lacks"),
    (r"Resource '|[Rr]etriev|Invalid URI", "`$ref` points to another document"),
    (r"\$ref must be", "`$ref` is not a string"),
    (
        r"(\w+) \((\S+?)\) is greater than (\w+) \((\S+?)\)",
        lambda m: f"no value fits: {m[1]} is {m[2]}, {m[3]} is {m[4]}",
    ),
    (r"required property '(.{1,100}?)'", lambda m: f"no value fits the property {m[1]!r}"),
    ("Unsatisfiable schema", _NO_VALUE),
    ("invalid regex|regex parse error|lookarounds not", _regex),
    (r"Invalid type: (.{1,64})", lambda m: f"{m[1]!r} is not a type of JSON"),
    ("type must be", "`type` is neither a type nor a list of types"),
    ("schema must be", "a subschema is neither an object nor a boolean"),
    (r"(\w+) must be an? (\w+)", lambda m: f"`{m[1]}` is not an {m[2]}"),
    (r"Expected [\w ]+ for '(\w+)'", lambda m: f"`{m[1]}` has a value of the wrong type"),
    ("invalid multiple of", "`multipleOf` is not above 0"),
    (r"'multipleOf' has too many", "`multipleOf` has too many digits"),
    ("are not disjoint", "two `patternProperties` match the same name with different schemas"),
    ("no start rule", "there is no rule named start"),
    (r'unknown name: "(.{1,64}?)"', lambda m: f"the rule or terminal {m[1]} is not defined"),
    (r"unknown grammar @?(\S{1,64})", lambda m: f"the grammar {m[1]} is not defined"),
    (r'unknown special token: "(.{1,64}?)"', lambda m: f"the model has no token {m[1]}"),
    (r'duplicate (?:rule|token): "(.{1,64}?)"', lambda m: f"{m[1]} is defined twice"),
    (r'circular reference in token "(.{1,64}?)"', lambda m: f"{m[1]} contains itself"),
    (r"common regex: ([\w.]{1,64})", lambda m: f"there is no terminal {m[1]} to import"),
    ("only supported for tokens", "`&` and `~` join terminals: name the rule in capitals"),
    ("range end must be", "the bounds of a repetition are in the wrong order"),
    (r"Token range|token range", "the model has no such token"),
    (r"too (?:many|big|large|complex)|Current row|[Tt]ooComplex|limit", _TOO_MUCH),
    (r"[Ee]xpected|lexer error|parsing|failed to parse|no fields set", "it cannot be read"),
    ("not supported", "a statement is not supported"),
)
_UNKNOWN: Final = "a part of it is not supported"


def client_reason(error: str) -> str:
    """Return a compiler's error in our words, with the line and column if it names them."""
    flat = " ".join(error.split())
    place = _PLACE.match(flat)
    where = f"line {place[1]}, column {place[2]}: " if place else ""
    flat = _QUOTED_LINE.split(flat)[0]
    for pattern, meaning in _MEANINGS:
        match = re.search(pattern, flat)
        if match is not None:
            return where + (meaning if isinstance(meaning, str) else meaning(match))
    return where + _UNKNOWN


def without_place(reason: str) -> str:
    """Return a reason without its line and column."""
    return _WRITTEN_PLACE.sub("", reason, count=1)
