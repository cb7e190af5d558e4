"""Expressions: what an answer may consist of, as a tree that `lark.py` writes for the compiler."""

from dataclasses import dataclass
from typing import Any, Final

from node.grammar.regexes import TextEscaping

JSON_ESCAPES: Final = 'nrbtf\\"u'


@dataclass(frozen=True, slots=True)
class Literal:
    """Fixed text, or the special token that stands for it."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Json:
    """Value that fits a schema; unless `is_strict`, unknown keywords are ignored."""

    schema: dict[str, Any]
    is_strict: bool = False
    escapes: str = JSON_ESCAPES  # characters that may follow a backslash


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that fully matches a regular expression."""

    regex: str


@dataclass(frozen=True, slots=True)
class Until:
    """Text that matches all of `matching` and contains none of `without`, followed by `end`."""

    end: str
    without: tuple[str, ...]
    matching: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TextRules:
    """Text that follows its own rules, with characters escaped by `escaping`."""

    rules: str
    escaping: TextEscaping


@dataclass(frozen=True, slots=True)
class Row:
    """Sequence of expressions."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Choice of one expression."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Maybe:
    """Optional expression."""

    part: "Expression"


@dataclass(frozen=True, slots=True)
class Many:
    """Expression repeated any number of times, including zero."""

    part: "Expression"


Expression = Literal | Json | Pattern | Until | TextRules | Row | OneOf | Maybe | Many


def row(*parts: Expression | str) -> Row:
    """Return the parts in sequence; texts become literals."""
    return Row(tuple(Literal(p) if isinstance(p, str) else p for p in parts))
