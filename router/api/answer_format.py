"""The JSON schema that an answer must fit, as newer dialects name it."""

from fabric.codec import dump_json
from fabric.errors import RejectedError
from fabric.turn.output_format import OutputFormat, OutputKind
from router.http.fields import Fields, refuse, require_object, require_text


def answer_format(form: Fields, *, strict_by_default: bool) -> OutputFormat | None:
    """Read a format: text, any object, or a schema; raise RejectedError for another."""
    kind = require_text(form.require("type"), form.param("type"))
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat(OutputKind.JSON_OBJECT)
    if kind != "json_schema":
        refuse(form.param("type"), "expected text, json_object or json_schema")
    schema = require_object(form.require("schema"), form.param("schema"))
    is_strict = strict_by_default if form.raw("strict") is None else form.flag("strict")
    made = OutputFormat(OutputKind.JSON_SCHEMA, dump_json(schema).decode(), is_strict)
    try:
        made.check()
    except RejectedError as error:
        param = form.param("schema")
        message = f"Invalid '{param}': {error.message}"
        raise RejectedError(message, code=error.code, param=param) from None
    return made
