"""The format of an answer, as OpenAI's API and vLLM's extensions declare it."""

import json
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fabric.limits import CHOICES_MAX
from fabric.turn.output_format import OutputFormat, OutputKind, schema_format
from router.http.refusals import kind_of, refuse
from router.http.schema import (
    AnyObject,
    AnyValue,
    Flag,
    Mapped,
    ObjectOf,
    Parsed,
    Tagged,
    Text,
    constant,
    either,
    only,
    optional,
)
from router.limits import KEY_CHARS_MAX

_ANY_OBJECT: Final = OutputFormat(OutputKind.JSON_OBJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedSchema:
    """JSON schema, as OpenAI has it."""

    name: str | None = optional(Text(KEY_CHARS_MAX))
    description: str | None = optional(Text())
    strict: bool = optional(Flag(), False)
    schema: Any = optional(AnyValue())

    def output(self) -> OutputFormat:
        if self.schema is None:
            return _ANY_OBJECT
        return schema_format(self.schema, is_strict=self.strict)


_LOOSE_SCHEMA: Final = Mapped(AnyObject(), partial(schema_format, is_strict=False))
RESPONSE_FORMAT: Final = Tagged(
    {
        "text": constant(None),
        "json_object": only("schema", _LOOSE_SCHEMA, _ANY_OBJECT),  # a schema: llama.cpp's way
        "json_schema": only("json_schema", Mapped(ObjectOf(_NamedSchema), _NamedSchema.output)),
    },
    "expected text, json_object or json_schema",
    "invalid_value",
)


def _json(value: Any, param: str) -> OutputFormat:
    if isinstance(value, str):  # some clients send the schema as text
        return OutputFormat(OutputKind.JSON_SCHEMA, value, is_strict=False)
    if not isinstance(value, (dict, bool)):
        refuse(param, f"expected a schema, got {kind_of(value)}", "invalid_type")
    return schema_format(value, is_strict=False)


def _choice(value: Any, param: str) -> OutputFormat:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        refuse(param, "expected a list of strings", "invalid_type")
    if len(value) > CHOICES_MAX:
        refuse(param, f"more than {CHOICES_MAX} items")
    return OutputFormat(OutputKind.CHOICE, json.dumps(value, ensure_ascii=False))


_TEXT: Final = Text().schema()
JSON_FORMAT: Final = Parsed(_json, either(AnyObject().schema(), _TEXT, Flag().schema()))
JSON_OBJECT_FORMAT: Final = Mapped(Flag(), lambda wanted: _ANY_OBJECT if wanted else None)
CHOICE_FORMAT: Final = Parsed(_choice, {"type": "array", "items": _TEXT, "maxItems": CHOICES_MAX})
REGEX_FORMAT: Final = Mapped(Text(), partial(OutputFormat, OutputKind.REGEX))
GRAMMAR_FORMAT: Final = Mapped(Text(), partial(OutputFormat, OutputKind.GRAMMAR))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """vLLM's extension: at most one of its fields is set."""

    json: OutputFormat | None = optional(JSON_FORMAT)
    json_object: OutputFormat | None = optional(JSON_OBJECT_FORMAT)
    choice: OutputFormat | None = optional(CHOICE_FORMAT)
    regex: OutputFormat | None = optional(REGEX_FORMAT)
    grammar: OutputFormat | None = optional(GRAMMAR_FORMAT)


STRUCTURED_OUTPUTS: Final = ObjectOf(StructuredOutputs)
