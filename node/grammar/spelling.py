"""Spell an output format in the compiler's own notations."""

import json
from typing import Any

from fabric.errors import RejectedError
from fabric.limits import JSON_INDENT_MAX
from fabric.turn.output_format import PARAM, OutputFormat, OutputKind, choices_of, tags_of

# As people and models write JSON: in one line, or one part to a line.
_SPACES = f"( |\\n[ \\t]{{0,{JSON_INDENT_MAX}}})?"


def spell(output: OutputFormat, special_texts: frozenset[str]) -> str:
    """Return the grammar; raise RejectedError for what is no schema.

    `special_texts` are those of the tokens that stand for no text.
    """
    from llguidance import LLMatcher

    match output.kind:
        case OutputKind.JSON_OBJECT:
            return _schema({"type": "object"}, is_strict=True)
        case OutputKind.JSON_SCHEMA:
            return _schema(_object(json.loads(output.source)), is_strict=output.is_strict)
        case OutputKind.REGEX:
            return str(LLMatcher.grammar_from_regex(output.source))
        case OutputKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(output.source))
        case OutputKind.CHOICE:
            texts = " | ".join(json.dumps(text) for text in choices_of(output))
            return str(LLMatcher.grammar_from_lark(f"start: {texts}"))
        case OutputKind.TAGS:
            return _tags(output, special_texts)


def _schema(schema: dict[str, Any], *, is_strict: bool) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(schema, overrides=_options(is_strict=is_strict)))


def _options(*, is_strict: bool) -> Any:
    return {
        "whitespace_pattern": _SPACES,
        "lenient": not is_strict,
        # A value that fits two of them is then let through.
        "coerce_one_of": not is_strict,
    }


def _object(schema: Any) -> dict[str, Any]:
    """Return the schema as an object: `true` is one that anything fits."""
    if schema is False:
        message = "the output format is refused: nothing fits the schema"
        raise RejectedError(message, code="invalid_format", param=PARAM)
    return {} if schema is True else dict(schema)


def _tags(output: OutputFormat, special_texts: frozenset[str]) -> str:
    from llguidance import LLMatcher, StructTag

    tags = tags_of(output)
    options = _options(is_strict=output.is_strict)
    spelled = [
        StructTag(
            trigger=tag.trigger,
            begin=tag.begin,
            grammar={**tag.schema, "x-guidance": options},
            end=tag.end,
        )
        for tag in tags
    ]
    is_special = all(tag.trigger in special_texts for tag in tags)
    lark = StructTag.to_grammar(spelled, assume_special=is_special)
    return str(LLMatcher.grammar_from_lark(lark))
