"""A client's JSON object, read field by field; every complaint names the parameter."""

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from fabric.errors import RejectedError
from router.limits import NAME_CHARS_TOLD

_KINDS: dict[type, str] = {
    bool: "a boolean",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
    type(None): "null",
}

_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def kind_of(value: object) -> str:
    """Name a JSON value's type as clients know it."""
    return _KINDS.get(type(value), "something else")


def refuse(param: str, why: str, code: str = "invalid_value") -> NoReturn:
    """Raise the 400 that names the offending parameter."""
    message = f"Invalid '{param}': {why}."
    raise RejectedError(message, code=code, param=param)


def unsupported(param: str, why: str) -> NoReturn:
    """Raise the 400 for what the dialect knows and this server does not do."""
    message = f"Unsupported '{param}': {why}."
    raise RejectedError(message, code="unsupported_parameter", param=param)


def require_object(value: object, param: str) -> dict[str, Any]:
    """Return `value` as an object."""
    if not isinstance(value, dict):
        refuse(param, f"expected an object, got {kind_of(value)}", "invalid_type")
    return value


def require_text(value: object, param: str) -> str:
    """Return `value` as a string."""
    if not isinstance(value, str):
        refuse(param, f"expected a string, got {kind_of(value)}", "invalid_type")
    return value


def query_flag(query: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """Return a parameter of the query that is true or false."""
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        refuse(name, "expected true or false")
    return _FLAGS[text.lower()]


class Fields:
    """Reads known fields; absent and null mean the same; `allow_only` refuses unknown ones."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix

    def param(self, name: str) -> str:
        return self._prefix + name

    def allow_only(self, *known: str) -> None:
        """Refuse a field that is not among the known ones: a misspelled wish must not be lost."""
        for name in self._body:
            if name not in known:
                close = get_close_matches(name[:NAME_CHARS_TOLD], known, n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
                shown = self.param(name[:NAME_CHARS_TOLD])
                message = f"Unknown parameter: '{shown}'; {hint}"
                raise RejectedError(message, code="unknown_parameter", param=shown)

    def raw(self, name: str) -> Any:
        """Return the field unchecked; None where it is absent."""
        return self._body.get(name)

    def require(self, name: str) -> Any:
        value = self._body.get(name)
        if value is None:
            message = f"Missing required parameter: '{self.param(name)}'."
            code = "missing_required_parameter"
            raise RejectedError(message, code=code, param=self.param(name))
        return value

    def text(self, name: str, chars_max: int | None = None) -> str | None:
        value = self.raw(name)
        if value is None:
            return None
        text = require_text(value, self.param(name))
        if chars_max is not None and len(text) > chars_max:
            refuse(self.param(name), f"longer than {chars_max} characters")
        return text

    def flag(self, name: str) -> bool:
        """Read a boolean; absent is false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            self._wrong_type(name, "a boolean")
        return bool(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong_type(name, "an integer")
        if not low <= value <= high:
            refuse(self.param(name), f"must be between {low} and {high}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self._wrong_type(name, "a number")
        # Compared as given: an integer may be too long to become a float.
        if not low <= value <= high or not math.isfinite(value):
            refuse(self.param(name), f"must be between {low:g} and {high:g}")
        return float(value)

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.raw(name)
        return None if value is None else require_object(value, self.param(name))

    def items(self, name: str, count_max: int) -> list[Any] | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self._wrong_type(name, "an array")
        if len(value) > count_max:
            refuse(self.param(name), f"more than {count_max} items")
        return list(value)

    def _wrong_type(self, name: str, expected: str) -> NoReturn:
        got = kind_of(self.raw(name))
        refuse(self.param(name), f"expected {expected}, got {got}", "invalid_type")
