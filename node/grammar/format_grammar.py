"""Grammars of the output formats that a request may ask for, in the compiler's notations."""

import json
from collections.abc import Collection
from typing import Any

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import PARAM, OutputFormat, OutputKind, choices_of, tags_of
from node.grammar.lark import json_options, lark_grammar


def format_grammar(output: OutputFormat, special_texts: Collection[str]) -> str:
    """Return the grammar of a format; raise RejectedError for an invalid schema.

    `special_texts` are the texts of special tokens.
    """
    from llguidance import LLMatcher

    match output.kind:
        case OutputKind.JSON_OBJECT:
            return _schema_grammar({"type": "object"}, is_strict=True)
        case OutputKind.JSON_SCHEMA:
            return _schema_grammar(
                _object_schema(json.loads(output.source)), is_strict=output.is_strict
            )
        case OutputKind.REGEX:
            return str(LLMatcher.grammar_from_regex(output.source))
        case OutputKind.GRAMMAR:
            return lark_grammar(output.source)
        case OutputKind.CHOICE:
            texts = " | ".join(json.dumps(text) for text in choices_of(output))
            return lark_grammar(f"start: {texts}")
        case OutputKind.TAGS:
            return _tag_grammar(output, special_texts)


def _schema_grammar(schema: dict[str, Any], *, is_strict: bool) -> str:
    from llguidance import LLMatcher

    return str(
        LLMatcher.grammar_from_json_schema(schema, overrides=json_options(is_strict=is_strict))
    )


def _object_schema(schema: Any) -> dict[str, Any]:
    """Return the schema as an object: any value fits `true`."""
    if schema is False:
        message = "the output format is refused: no value fits the schema"
        raise RejectedError(message, code="invalid_format", param=PARAM)
    return {} if schema is True else dict(schema)


def _tag_grammar(output: OutputFormat, special_texts: Collection[str]) -> str:
    from llguidance import StructTag

    tags = tags_of(output)
    options = json_options(is_strict=output.is_strict)
    structures = [
        StructTag(
            trigger=tag.trigger,
            begin=tag.begin,
            grammar={**tag.schema, "x-guidance": options},
            end=tag.end,
        )
        for tag in tags
    ]
    is_special = all(tag.trigger in special_texts for tag in tags)
    lark = StructTag.to_grammar(structures, assume_special=is_special)
    return lark_grammar(lark)
