"""Complaints about a client's parameters: each one names the parameter and what is wrong."""

from collections.abc import Mapping
from typing import Any, NoReturn

from fabric.errors import RejectedError

_KINDS: dict[type, str] = {
    bool: "a boolean",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "an array",
    str: "a string",
    type(None): "null",
}

_UNSUPPORTED = ("unsupported_parameter", "unsupported_content")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def kind_of(value: object) -> str:
    """Return the JSON name of a value's type."""
    return _KINDS.get(type(value), "something else")


def refuse(param: str, why: str, code: str = "invalid_value") -> NoReturn:
    """Raise the 400 that names an invalid or, if the code says so, unsupported parameter."""
    problem = "Unsupported" if code in _UNSUPPORTED else "Invalid"
    message = f"{problem} '{param}': {why}."
    raise RejectedError(message, code=code, param=param)


def unsupported(param: str, why: str) -> NoReturn:
    """Raise the 400 for a parameter of the dialect that this server does not support."""
    refuse(param, why, "unsupported_parameter")


def wrong_type(value: object, param: str, expected: str) -> NoReturn:
    """Raise the 400 for a value of another JSON type."""
    refuse(param, f"expected {expected}, got {kind_of(value)}", "invalid_type")


def require_object(value: object, param: str) -> dict[str, Any]:
    """Return `value` as an object."""
    if not isinstance(value, dict):
        wrong_type(value, param, "an object")
    return value


def require_text(value: object, param: str) -> str:
    """Return `value` as a string."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    return value


def query_flag(query: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """Return a boolean parameter of the query."""
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in _FLAGS:
        refuse(name, "expected true or false")
    return _FLAGS[text.lower()]
