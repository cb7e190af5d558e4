"""Output formats of answers, and the limits on their schemas and grammars.

Compile time is quadratic in some parts of a grammar. Each of those has a limit, so that every
accepted grammar compiles well within a second. `source` is text all the way, so that it has one
spelling for digests and caches, and its objects keep their order: answers follow it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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
                check_schema(_parsed(self.source))
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
    texts = _parsed(output.source)
    is_list = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    _require(is_list, "not a list of non-empty texts")
    _require(0 < len(texts) <= CHOICES_MAX, f"not 1 to {CHOICES_MAX} choices")
    _require(all(len(text) <= SCHEMA_TEXT_CHARS_MAX for text in texts), _long_text())
    return tuple(texts)


def tags_of(output: OutputFormat) -> tuple[OutputTag, ...]:
    """Return the tags; raise RejectedError if they are invalid."""
    plain = _parsed(output.source)
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


def _parsed(source: str) -> Any:
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
