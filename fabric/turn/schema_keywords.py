"""Keywords of JSON Schema: where subschemas are, and which keywords nodes enforce.

The lists of enforced keywords and formats are those of the nodes' grammar compiler, to which
`tests/node/grammar` holds them.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

DEFINITIONS: Final[tuple[str, ...]] = ("$defs", "definitions")
# Keywords by what they hold: subschemas by name, a list of them, one of them, or plain values.
SCHEMA_MAPS: Final = frozenset(
    {"properties", "patternProperties", "dependentSchemas", *DEFINITIONS}
)
SCHEMA_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMAS: Final = frozenset({"items", "contains", "not", "if", "then", "else", "propertyNames"})
VALUES: Final = frozenset({"const", "default", "enum", "examples"})
# Keywords that do not constrain a value.
ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "example", "examples", "deprecated", "readOnly"}
    | {"writeOnly", "$comment", "$schema", "$id", "id", "$anchor", "$vocabulary", *DEFINITIONS}
)
ENFORCED: Final = frozenset(
    {"type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref"}
    | {"properties", "patternProperties", "additionalProperties", "required"}
    | {"minProperties", "maxProperties", "items", "prefixItems", "additionalItems"}
    | {"minItems", "maxItems", "minLength", "maxLength", "pattern", "format"}
    | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
    | {"unknown"}
)


def unenforced_keywords(schema: Any, *, is_strict: bool) -> tuple[str, ...]:
    """Return the keywords of a schema that no node enforces, once each, in order.

    An unknown format is `format=NAME`; `oneOf` is `anyOf` where the schema is not strict.
    """
    keywords: dict[str, None] = {}
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        keywords |= dict.fromkeys(_unenforced_keywords(part, is_strict=is_strict))
        waiting.extend(reversed(list(_subschemas(part))))
    return tuple(keywords)


def _unenforced_keywords(schema: dict[str, Any], *, is_strict: bool) -> Iterator[str]:
    for key, value in schema.items():
        if key == "oneOf" and not is_strict:
            yield key
        elif key == "format" and isinstance(value, str) and value not in FORMATS:
            if "string" in _types(schema):
                yield f"format={value}"
        elif key not in ENFORCED and key not in ANNOTATIONS and not key.startswith("x-"):
            yield key


def _types(schema: dict[str, Any]) -> Iterable[Any]:
    stated = schema.get("type", "string")
    return stated if isinstance(stated, list) else (stated,)


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the subschemas of the keywords that are enforced, and of definitions."""
    for key, value in schema.items():
        if key not in ENFORCED and key not in DEFINITIONS:
            continue
        if key in SCHEMA_MAPS and isinstance(value, dict):
            yield from value.values()
        elif isinstance(value, list) and (key in SCHEMA_LISTS or key == "items"):
            yield from value
        elif key in SCHEMAS or key in ("additionalProperties", "additionalItems"):
            yield value
