"""What an answer must look like, as OpenAI's API has it and as vLLM's extensions do."""

import json
from collections.abc import Callable
from typing import Any

from fabric.limits import CHOICES_MAX
from fabric.turn.output_format import OutputFormat, OutputKind, schema_format
from router.http.fields import Fields, kind_of, refuse, require_object, require_text
from router.limits import KEY_CHARS_MAX

_STRUCTURED = "structured_outputs"


def parse_output_format(fields: Fields) -> OutputFormat | None:
    """Read the one format that a request names; raise RejectedError if it names two."""
    named = {"response_format": _response_format(fields)}
    options = Fields(fields.object(_STRUCTURED) or {}, f"{fields.param(_STRUCTURED)}.")
    for name, read in _EXTENSIONS.items():
        named[f"guided_{name}"] = _read(fields, f"guided_{name}", read)
        named[options.param(name)] = _read(options, name, read)
    found = [(param, output) for param, output in named.items() if output is not None]
    if not found:
        return None
    (_, output), *others = found
    if others:
        refuse(others[0][0], "the answer has a format already")
    output.check()
    return output


def _response_format(fields: Fields) -> OutputFormat | None:
    form = fields.object("response_format")
    if form is None:
        return None
    inner = Fields(form, f"{fields.param('response_format')}.")
    kind = require_text(inner.require("type"), inner.param("type"))
    if kind == "json_schema":
        return _json_schema(inner)
    if kind == "json_object":
        schema = inner.object("schema")  # llama.cpp's way to ask for one
        return _any_object() if schema is None else schema_format(schema, is_strict=False)
    if kind != "text":
        refuse(inner.param("type"), "expected text, json_object or json_schema")
    return None


def _json_schema(form: Fields) -> OutputFormat:
    named = require_object(form.require("json_schema"), form.param("json_schema"))
    inner = Fields(named, f"{form.param('json_schema')}.")
    inner.text("name", KEY_CHARS_MAX)
    inner.text("description")
    is_strict = inner.flag("strict")
    schema = inner.raw("schema")
    return _any_object() if schema is None else schema_format(schema, is_strict=is_strict)


def _any_object() -> OutputFormat:
    return OutputFormat(OutputKind.JSON_OBJECT)


def _read(
    fields: Fields, name: str, read: Callable[[Any, str], OutputFormat | None]
) -> OutputFormat | None:
    value = fields.raw(name)
    return None if value is None else read(value, fields.param(name))


def _json(value: Any, param: str) -> OutputFormat:
    if isinstance(value, str):  # sent as text as well
        return OutputFormat(OutputKind.JSON_SCHEMA, value, is_strict=False)
    if not isinstance(value, (dict, bool)):
        refuse(param, f"expected a schema, got {kind_of(value)}", "invalid_type")
    return schema_format(value, is_strict=False)


def _json_object(value: Any, param: str) -> OutputFormat | None:
    if not isinstance(value, bool):
        refuse(param, f"expected a boolean, got {kind_of(value)}", "invalid_type")
    return _any_object() if value else None


def _choice(value: Any, param: str) -> OutputFormat:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        refuse(param, "expected a list of strings", "invalid_type")
    if len(value) > CHOICES_MAX:
        refuse(param, f"more than {CHOICES_MAX} items")
    return OutputFormat(OutputKind.CHOICE, json.dumps(value, ensure_ascii=False))


def _regex(value: Any, param: str) -> OutputFormat:
    return OutputFormat(OutputKind.REGEX, require_text(value, param))


def _grammar(value: Any, param: str) -> OutputFormat:
    return OutputFormat(OutputKind.GRAMMAR, require_text(value, param))


_EXTENSIONS: dict[str, Callable[[Any, str], OutputFormat | None]] = {
    "json": _json,
    "json_object": _json_object,
    "choice": _choice,
    "regex": _regex,
    "grammar": _grammar,
}
