"""Spell an output format in the compiler's own notations."""

import json
from collections.abc import Collection
from typing import Any

from fabric.errors import RejectedError
from fabric.turn.output_format import PARAM, OutputFormat, OutputKind, choices_of, tags_of
from node.grammar.json_options import json_options


def spell(output: OutputFormat, special_texts: Collection[str]) -> str:
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
            return lark_grammar(output.source)
        case OutputKind.CHOICE:
            texts = " | ".join(json.dumps(text) for text in choices_of(output))
            return lark_grammar(f"start: {texts}")
        case OutputKind.TAGS:
            return _tags(output, special_texts)


def lark_grammar(lark: str) -> str:
    """Name a grammar in Lark's notation as one."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_lark(lark))


def _schema(schema: dict[str, Any], *, is_strict: bool) -> str:
    from llguidance import LLMatcher

    return str(
        LLMatcher.grammar_from_json_schema(schema, overrides=json_options(is_strict=is_strict))
    )


def _object(schema: Any) -> dict[str, Any]:
    """Return the schema as an object: `true` is one that anything fits."""
    if schema is False:
        message = "the output format is refused: nothing fits the schema"
        raise RejectedError(message, code="invalid_format", param=PARAM)
    return {} if schema is True else dict(schema)


def _tags(output: OutputFormat, special_texts: Collection[str]) -> str:
    from llguidance import StructTag

    tags = tags_of(output)
    options = json_options(is_strict=output.is_strict)
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
    return lark_grammar(lark)
