"""What an answer may say, as a tree: how it is written for the compiler is `lark.py`'s business."""

from dataclasses import dataclass
from typing import Any, Final

from node.grammar.respelled import TextSpelling

JSON_ESCAPES: Final = 'nrbtf\\"u'


@dataclass(frozen=True, slots=True)
class Literal:
    """A fixed text, or the special token that spells it."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Json:
    """A value that fits a schema; if not `is_strict`, keywords that are not known are ignored."""

    schema: dict[str, Any]
    is_strict: bool = False
    escapes: str = JSON_ESCAPES  # what may follow a backslash


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that a regular expression matches in whole."""

    regex: str


@dataclass(frozen=True, slots=True)
class Until:
    """Text that all of `matching` match, with none of `without` in it, and then `end`."""

    end: str
    without: tuple[str, ...]
    matching: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TextRules:
    """Text that follows rules of its own, each character as `spelling` writes it."""

    rules: str
    spelling: TextSpelling


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence of expressions."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    """Any one of them."""

    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Maybe:
    """An optional expression."""

    part: "Expression"


@dataclass(frozen=True, slots=True)
class Many:
    """An expression repeated any number of times, including zero."""

    part: "Expression"


Expression = Literal | Json | Pattern | Until | TextRules | Row | OneOf | Maybe | Many


def row(*parts: Expression | str) -> Row:
    """Return them one behind the other; texts are literals."""
    return Row(tuple(Literal(p) if isinstance(p, str) else p for p in parts))
