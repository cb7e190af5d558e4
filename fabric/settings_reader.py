"""Reader of settings from plain data, which reports every mistake at its key.

The strict reader of messages (`fabric/codec.py`) stops at the first one, which is right for
programs. A person would have to run it as often as there are mistakes.
"""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from fabric.errors import RejectedError
from fabric.units import parse_bytes, parse_seconds

_INVALID: Final = object()  # in place of a value that cannot be used
_SHOWN_CHARS: Final = 40
AUTOMATIC: Final = "auto"  # the program chooses


@dataclass(frozen=True, slots=True)
class SettingProblem:
    """One invalid setting, and what to write instead."""

    where: str  # its path, such as macfabric.node.hot_bytes
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class SettingsError(RejectedError):
    """One or more settings are wrong."""

    code = "invalid_settings"

    def __init__(self, problems: Iterable[SettingProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)), param=self.problems[0].where)


def require_no_problems(problems: Iterable[SettingProblem]) -> None:
    """Raise SettingsError for problems, if there are any."""
    found = tuple(problems)
    if found:
        raise SettingsError(found)


def read_class(kind: Any, value: Any, where: str, problems: list[SettingProblem]) -> Any:
    """Build a dataclass whose fields have defaults; append mistakes to `problems`.

    Invalid fields have their defaults in the result, so that the rest can be checked, too.
    """
    built = _read_fields(kind, {} if value is None else value, where, problems)
    return kind() if built is _INVALID else built


def _read_fields(kind: Any, value: Any, where: str, problems: list[SettingProblem]) -> Any:
    if not isinstance(value, dict):
        problems.append(SettingProblem(where, f"must be a map of `key: value`, not {_kind(value)}"))
        return _INVALID
    hints, by_name = get_type_hints(kind), {field.name: field for field in fields(kind)}
    arguments = {}
    for name, item in value.items():
        if name not in by_name:
            problems.append(SettingProblem(f"{where}.{name}", _unknown(str(name), list(by_name))))
            continue
        read = _read(hints[name], item, f"{where}.{name}", problems)
        if read is not _INVALID:
            arguments[name] = read
    for name, field in by_name.items():
        is_required = field.default is MISSING and field.default_factory is MISSING
        if is_required and name not in arguments:
            if name not in value:
                problems.append(SettingProblem(f"{where}.{name}", "is missing"))
            return _INVALID
    return kind(**arguments)


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"is unknown; did you mean {near[0]}?" if near else f"is unknown; keys are {known}"


def _read(kind: Any, value: Any, where: str, problems: list[SettingProblem]) -> Any:
    if is_dataclass(kind):
        return _read_fields(kind, value, where, problems)
    if kind is Any:
        return value
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        if value is None or (value == AUTOMATIC and _is_bytes(where.rpartition(".")[2])):
            return None
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
        return _read(kind, value, where, problems)
    if origin is dict:
        return _read_map(get_args(kind)[1], value, where, problems)
    if origin is tuple:
        return _read_list(get_args(kind)[0], value, where, problems)
    read = _read_scalar(kind, value, where.rpartition(".")[2])
    if read is _INVALID:
        problems.append(
            SettingProblem(where, _describe_expected(kind, value, where.rpartition(".")[2]))
        )
    return read


def _read_map(kind: Any, value: Any, where: str, problems: list[SettingProblem]) -> Any:
    if not isinstance(value, dict):
        problems.append(SettingProblem(where, f"must be a map of `key: value`, not {_kind(value)}"))
        return _INVALID
    read = {}
    for name, item in value.items():
        if not isinstance(name, str):
            problems.append(SettingProblem(f"{where}.{name}", "put this name in quotes"))
            continue
        one = _read(kind, item, f"{where}.{name}", problems)
        if one is not _INVALID:
            read[name] = one
    return read


def _read_list(kind: Any, value: Any, where: str, problems: list[SettingProblem]) -> Any:
    if not isinstance(value, list):
        problems.append(SettingProblem(where, f"must be a list such as [a, b], not {_kind(value)}"))
        return _INVALID
    read = (_read(kind, item, f"{where}[{i}]", problems) for i, item in enumerate(value))
    return tuple(item for item in read if item is not _INVALID)


def _read_scalar(kind: type, value: Any, name: str) -> Any:
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and isinstance(value, str) and _is_bytes(name):
        read = parse_bytes(value)
        return _INVALID if read is None else read
    if kind is float and isinstance(value, str) and _is_seconds(name):
        seconds = parse_seconds(value)
        return _INVALID if seconds is None else seconds
    return _INVALID


def _is_bytes(name: str) -> bool:
    return name.endswith(("_bytes", "_bytes_per_s"))


def _is_seconds(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _describe_expected(kind: type, value: Any, name: str) -> str:
    if kind is str:  # it may be a key: it is not repeated
        remedy = ": put it in quotes" if isinstance(value, bool | int | float) else ""
        return f"must be text, not {_kind(value)}{remedy}"
    if kind is bool:
        expected = "true or false"
    elif _is_bytes(name):
        expected = "a number of bytes, such as 8589934592 or 8GiB"
    elif _is_seconds(name):
        expected = "a number of seconds, such as 86400 or 24h"
    else:
        expected = "a whole number" if kind is int else "a number"
    shown = repr(value) if isinstance(value, str | int | float) else _kind(value)
    return f"must be {expected}, not {shown[:_SHOWN_CHARS]}"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text",
             list: "a list", dict: "a map"}  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")
