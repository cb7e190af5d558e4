"""How JSON is written where a schema prescribes it."""

from typing import Any

from node.limits import JSON_INDENT_MAX

# As people and models write it: in one line, or one part to a line.
_SPACES = f"( |\\n[ \\t]{{0,{JSON_INDENT_MAX}}})?"


def json_options(*, is_strict: bool, escapes: str | None = None) -> Any:
    """Return the compiler's options; `escapes` are what may follow a backslash."""
    options: dict[str, Any] = {
        "whitespace_pattern": _SPACES,
        "lenient": not is_strict,
        # A value that fits two of them is then let through.
        "coerce_one_of": not is_strict,
    }
    return options if escapes is None else {**options, "json_allowed_escapes": escapes}
