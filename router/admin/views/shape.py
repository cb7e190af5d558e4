"""Answers of the fabric's own API, each declared once, as attributes of what it shows.

PIN = AnswerShape(AgentView, "agent.pin", "node", "pinned", "pin_held", id="agent")
PIN.row(view)  # {"id": "mira", "object": "agent.pin", "node": "mac-1", ...}
PIN.schema()   # the same names, with the types that the class gives them
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Final, TypeAlias, Union, get_args, get_origin, get_type_hints

from fabric.codec import is_left_out, to_plain, wire_name
from fabric.ids import AgentId
from router.api.openapi import AGENT_ID, FLAG, answer, array, integer, number, one_of, text
from router.http.schema import Schema, either

Row: TypeAlias = dict[str, Any]
_SCHEMAS: Final[Mapping[Any, Schema]] = {
    AgentId: AGENT_ID,
    NoneType: {"type": "null"},
    bool: FLAG,
    float: number(),
    int: integer(),
    str: text(),
}


class AnswerShape:
    """One kind of answer: attributes of a class by their JSON names, and values beside them."""

    def __init__(
        self,
        cls: type,
        kind: str | None,
        *names: str,
        beside: Mapping[str, Any] | None = None,  # types, or schemas, of the other values
        **renamed: str,  # attributes, or paths to one, by JSON name, or that and a `_`
    ) -> None:
        self._cls = cls
        self._object = {} if kind is None else {"object": kind}
        self._paths = {name.rstrip("_"): path for name, path in renamed.items()}
        self._paths |= {name: name for name in names}
        self._getters = {name: attrgetter(path) for name, path in self._paths.items()}
        self._beside = dict(beside or {})

    def row(self, shown: Any, **beside: Any) -> Row:
        """Return the answer as JSON."""
        assert beside.keys() == self._beside.keys(), "as declared"
        named = {name: to_plain(get(shown)) for name, get in self._getters.items()}
        return {
            **named,
            **self._object,
            **{name: to_plain(value) for name, value in beside.items()},
        }

    def schema(self) -> Schema:
        """Return the schema of the answer: all of its fields are there, and more may come."""
        kinds = {name: one_of(kind) for name, kind in self._object.items()}
        paths = {name: type_schema(_type_at(self._cls, at)) for name, at in self._paths.items()}
        return answer(**{**paths, **kinds, **_schemas(self._beside)})


def _schemas(types: Mapping[str, Any]) -> dict[str, Schema]:
    return {
        name: hint if isinstance(hint, dict) else type_schema(hint) for name, hint in types.items()
    }


def _type_at(cls: type, path: str) -> Any:
    hint: Any = cls
    for name in path.split("."):
        hint = get_type_hints(hint)[name]
    return hint


def type_schema(hint: Any) -> Schema:
    """Return the schema of a type's values as JSON."""
    if hint in _SCHEMAS:
        return _SCHEMAS[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return either(*(type_schema(argument) for argument in arguments))
    if origin in (tuple, list):
        return array(type_schema(arguments[0]))
    if origin is not None:  # a mapping
        return {"type": "object", "additionalProperties": type_schema(arguments[1])}
    if is_dataclass(hint):
        return _class_schema(hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return one_of(*(member.value for member in hint))
    return type_schema(hint.__supertype__)  # of a NewType


def _class_schema(cls: Any) -> Schema:
    hints = get_type_hints(cls)
    named = {wire_name(field): type_schema(hints[field.name]) for field in fields(cls)}
    schema = answer(**named)
    schema["required"] = [wire_name(field) for field in fields(cls) if not is_left_out(field)]
    return schema
