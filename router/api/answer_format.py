"""The format of an answer, as newer dialects declare it."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from fabric.errors import RejectedError
from fabric.turn.output_format import OutputFormat, OutputKind, schema_format
from router.http.schema import (
    AnyObject,
    Flag,
    Mapped,
    ObjectOf,
    Tagged,
    Text,
    constant,
    optional,
    param_path,
    required,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaFormat:
    name: str | None = optional(Text())
    schema: dict[str, Any] = required(AnyObject())
    strict: bool | None = optional(Flag())
    param: str = param_path()


def answer_format(*, is_strict: bool) -> Tagged:
    """Return the kind of a format, with `is_strict` as its default."""
    return Tagged(
        {
            "text": constant(None),
            "json_object": constant(OutputFormat(OutputKind.JSON_OBJECT)),
            "json_schema": Mapped(ObjectOf(_SchemaFormat), partial(_checked, is_strict)),
        },
        "expected text, json_object or json_schema",
        "invalid_value",
    )


def _checked(is_strict: bool, form: _SchemaFormat) -> OutputFormat:  # noqa: FBT001 - bound above
    is_strict = is_strict if form.strict is None else form.strict
    output = schema_format(form.schema, is_strict=is_strict)
    try:
        output.check()
    except RejectedError as error:
        param = f"{form.param}.schema"
        message = f"Invalid '{param}': {error.message}"
        raise RejectedError(message, code=error.code, param=param) from None
    return output
