"""Declarations of request bodies: each one gives a reader and the JSON schema of the same fields.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class PinBody:
        pinned: bool = required(Flag())

    PIN = ObjectOf(PinBody)
    PIN.read({"pinned": True})  # PinBody(pinned=True), or RejectedError naming the parameter
    PIN.schema()                # what GET /openapi.json shows

Null means the same as absent. Unknown fields are ignored unless a record is strict.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final, Generic, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from fabric.errors import RejectedError
from fabric.ids import parse_agent_id, parse_operation_id
from router.http.refusals import refuse, require_object, require_text, unsupported, wrong_type
from router.limits import QUOTED_NAME_CHARS_MAX

Schema: TypeAlias = dict[str, Any]
R = TypeVar("R")

_WHOLE: Final = re.compile(r"-?[0-9]{1,20}")  # no seed has more digits
_DECIMAL: Final = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")
_KIND, _NAME = "kind", "name"
_ABOUT, _SENT, _PATH = "about", "sent", "path"  # of fields that hold the path of their record


class JsonKind(Protocol):
    """One kind of JSON value: how it is read, and its JSON schema."""

    def read(self, value: Any, param: str) -> Any: ...

    def schema(self) -> Schema: ...


def required(kind: JsonKind, name: str = "") -> Any:
    """Declare a field that a body must have; `name` is its JSON name if it differs."""
    return field(metadata={_KIND: kind, _NAME: name})


def optional(kind: JsonKind, default: Any = None, name: str = "") -> Any:
    """Declare a field that may be absent or null."""
    return field(default=default, metadata={_KIND: kind, _NAME: name})


def as_sent() -> Any:
    """Declare a field that holds the JSON object its record was read from."""
    return field(metadata={_ABOUT: _SENT})


def param_path() -> Any:
    """Declare a field that holds the parameter path of its record, for later complaints."""
    return field(metadata={_ABOUT: _PATH})


def either(*schemas: Schema) -> Schema:
    """Return the schema of a value that fits any of the given ones."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """Return the schema of a value that may also be null."""
    schemas = schema["anyOf"] if schema.keys() == {"anyOf"} else [schema]
    return either(*schemas, {"type": "null"})


def _without_none(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Text:
    """A string of bounded length."""

    chars_max: int | None = None
    chars_min: int = 0
    pattern: str | None = None  # for the schema only: the text's own parser checks it

    def read(self, value: Any, param: str) -> str:
        text = require_text(value, param)
        if self.chars_max is not None and len(text) > self.chars_max:
            refuse(param, f"longer than {self.chars_max} characters")
        if self.chars_min and not text:
            refuse(param, "it is empty")
        return text

    def schema(self) -> Schema:
        bounds = {"minLength": self.chars_min or None, "maxLength": self.chars_max}
        return _without_none({"type": "string", **bounds, "pattern": self.pattern})


@dataclass(frozen=True, slots=True)
class Flag:
    """A boolean."""

    def read(self, value: Any, param: str) -> bool:
        if not isinstance(value, bool):
            wrong_type(value, param, "a boolean")
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"}


def read_whole(value: Any, param: str, *, takes_text: bool = False) -> int:
    """Return a whole number, which may be written as 64.0; RejectedError for any other value."""
    if takes_text and isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(value, param, "an integer")
    return value


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within bounds."""

    low: int
    high: int
    takes_text: bool = False  # also as a string, as vLLM and SGLang take it

    def read(self, value: Any, param: str) -> int:
        number = read_whole(value, param, takes_text=self.takes_text)
        if not self.low <= number <= self.high:
            refuse(param, f"must be between {self.low} and {self.high}")
        return number

    def schema(self) -> Schema:
        whole = {"type": "integer", "minimum": self.low, "maximum": self.high}
        return _or_text(whole, _WHOLE) if self.takes_text else whole


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds."""

    low: float
    high: float
    takes_text: bool = False  # also as a string, as vLLM and SGLang take it

    def read(self, value: Any, param: str) -> float:
        if self.takes_text and isinstance(value, str) and _DECIMAL.fullmatch(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            wrong_type(value, param, "a number")
        # Compared as sent: an integer may be too long to become a float.
        if not self.low <= value <= self.high or not math.isfinite(value):
            refuse(param, f"must be between {self.low:g} and {self.high:g}")
        return float(value)

    def schema(self) -> Schema:
        number = {"type": "number", "minimum": self.low, "maximum": self.high}
        return _or_text(number, _DECIMAL) if self.takes_text else number


def _or_text(number: Schema, pattern: re.Pattern[str]) -> Schema:
    return either(number, {"type": "string", "pattern": f"^{pattern.pattern}$"})


@dataclass(frozen=True, slots=True)
class WordIn:
    """One of several words, each read as its value."""

    values: Mapping[str, Any]
    expected: str = ""
    code: str = "invalid_value"

    def read(self, value: Any, param: str) -> Any:
        word = require_text(value, param)
        if word not in self.values:
            expected = self.expected or f"one of {', '.join(self.values)}"
            refuse(param, f"expected {expected}", self.code)
        return self.values[word]

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.values)}


def words(*known: str, expected: str = "") -> WordIn:
    """Return the kind of one of the known words."""
    return WordIn({word: word for word in known}, expected)


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """An array of bounded length."""

    of: JsonKind
    count_max: int | None  # None: the bounds of the whole body are enough
    count_min: int = 0
    noun: str = "items"
    names_items: bool = True  # in complaints about one of them

    def read(self, value: Any, param: str) -> list[Any]:
        if not isinstance(value, list):
            wrong_type(value, param, "an array")
        if self.count_max is not None and len(value) > self.count_max:
            refuse(param, f"more than {self.count_max} {self.noun}")
        if len(value) < self.count_min:
            refuse(param, "it is empty")
        read = self.of.read
        if not self.names_items:
            return [read(item, param) for item in value]
        return [read(item, f"{param}[{index}]") for index, item in enumerate(value)]

    def schema(self) -> Schema:
        bounds = {"maxItems": self.count_max, "minItems": self.count_min or None}
        return _without_none({"type": "array", "items": self.of.schema(), **bounds})


@dataclass(frozen=True, slots=True)
class AnyObject:
    """An object with any fields."""

    def read(self, value: Any, param: str) -> dict[str, Any]:
        return require_object(value, param)

    def schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class AnyValue:
    """A value of any kind."""

    def read(self, value: Any, param: str) -> Any:
        return value

    def schema(self) -> Schema:
        return {}


@dataclass(frozen=True, slots=True)
class Either:
    """A value of one of several JSON types, each with its own kind."""

    kinds: Mapping[type, JsonKind]
    expected: str = ""  # empty: the last kind complains about a value of another type
    code: str = "invalid_type"

    def read(self, value: Any, param: str) -> Any:
        kind = self.kinds.get(type(value))
        if kind is None and self.expected:
            refuse(param, f"expected {self.expected}", self.code)
        return (kind or list(self.kinds.values())[-1]).read(value, param)

    def schema(self) -> Schema:
        return either(*(kind.schema() for kind in self.kinds.values()))


@dataclass(frozen=True, slots=True)
class Parsed:
    """Value that a function reads, and its schema."""

    parse: Callable[[Any, str], Any]
    described: Schema

    def read(self, value: Any, param: str) -> Any:
        return self.parse(value, param)

    def schema(self) -> Schema:
        return self.described


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of the dialect that this server refuses, apart from values without effect."""

    why: str
    harmless: tuple[Any, ...] = ()
    described: Schema = field(default_factory=dict)

    def read(self, value: Any, param: str) -> Any:
        if value not in self.harmless:
            unsupported(param, self.why)
        return value

    def schema(self) -> Schema:
        return self.described


class _Declared(NamedTuple):
    """One declared field of a record's class."""

    name: str  # in JSON
    attribute: str
    kind: JsonKind
    is_required: bool


@cache
def _declarations(cls: type) -> tuple[_Declared, ...]:
    return tuple(
        _Declared(
            declared.metadata[_NAME] or declared.name,
            declared.name,
            declared.metadata[_KIND],
            declared.default is MISSING,
        )
        for declared in fields(cls)
        if _KIND in declared.metadata
    )


@cache
def _about(cls: type) -> tuple[tuple[str, str], ...]:
    named = ((declared.name, declared.metadata.get(_ABOUT)) for declared in fields(cls))
    return tuple((name, about) for name, about in named if about is not None)


@dataclass(frozen=True, slots=True)
class ObjectOf(Generic[R]):
    """An object with the declared fields of a dataclass, and read as one."""

    cls: Callable[..., R]
    is_strict: bool = False  # refuses unknown fields: a misspelled option must not be lost
    one_of: tuple[tuple[str, ...], ...] = ()  # sets of fields: an object has exactly one set
    hint: str = ""  # names the sets where an object has none

    def read(self, value: Any, param: str = "") -> R:
        """Return the object as an instance of the class; raise RejectedError if it is invalid."""
        body = require_object(value, param)
        prefix = f"{param}." if param else ""
        declared = _declarations(self.cls)
        if self.is_strict:
            known = [one.name for one in declared]
            for name in body:
                if name not in known:
                    _refuse_unknown(name, known, prefix)
        if self.one_of:
            self._check_names(body, param, prefix)
        arguments: dict[str, Any] = {
            attribute: body if about == _SENT else param for attribute, about in _about(self.cls)
        }
        for name, attribute, kind, is_required in declared:
            item = body.get(name)
            if item is not None:
                arguments[attribute] = kind.read(item, prefix + name)
            elif is_required:
                refuse_missing(prefix + name)
        return self.cls(**arguments)

    def _check_names(self, body: Mapping[str, Any], param: str, prefix: str) -> None:
        present = {name for name in chain(*self.one_of) if body.get(name) is not None}
        if any(present == set(names) for names in self.one_of):
            return
        for names in self.one_of:
            if present and present < set(names):
                refuse_missing(prefix + next(name for name in names if name not in present))
        refuse(param, self.hint)

    def schema(self) -> Schema:
        if self.one_of:
            return either(*(self._schema(names) for names in self.one_of))
        return self._schema(())

    def _schema(self, chosen: tuple[str, ...]) -> Schema:
        """Return the schema of objects with one set of fields, and without the others."""
        absent = set(chain(*self.one_of)) - set(chosen)
        properties: dict[str, Schema] = {}
        required_names = []
        for declared in _declarations(self.cls):
            if declared.name in absent:
                continue
            schema = declared.kind.schema()
            if declared.is_required or declared.name in chosen:
                required_names.append(declared.name)
            elif schema:
                schema = nullable(schema)
            properties[declared.name] = schema
        described: Schema = {"type": "object", "properties": properties}
        described["required"] = required_names
        return described | ({"additionalProperties": False} if self.is_strict else {})


@dataclass(frozen=True, slots=True)
class Mapped:
    """A value of another kind, replaced by what a function makes of it."""

    kind: JsonKind
    make: Callable[[Any], Any]

    def read(self, value: Any, param: str = "") -> Any:
        return self.make(self.kind.read(value, param))

    def schema(self) -> Schema:
        return self.kind.schema()


def only(name: str, kind: JsonKind, default: Any = MISSING, *, is_strict: bool = False) -> Mapped:
    """Return the kind of an object of which one field is read, and stands for the object."""
    declared = required(kind, name) if default is MISSING else optional(kind, default, name)
    cls = make_dataclass("Only", [("value", Any, declared)])
    return Mapped(ObjectOf(cls, is_strict), attrgetter("value"))


def constant(value: Any) -> Mapped:
    """Return the kind of an object that stands for the value, regardless of its fields."""
    return Mapped(AnyObject(), lambda _: value)


@dataclass(frozen=True, slots=True)
class Tagged:
    """An object whose kind is chosen by a word in one of its fields."""

    kinds: Mapping[str, JsonKind]
    refusal: str = ""  # of other words, which `{}` stands for
    code: str = "unsupported_parameter"
    tag: str = "type"
    default: str = ""  # of objects without the field
    other: JsonKind | None = None  # of any other word

    def read(self, value: Any, param: str) -> Any:
        body = require_object(value, param)
        word = body.get(self.tag)
        if self.default and (word is None or word == ""):
            word = self.default
        at = f"{param}.{self.tag}"
        if word is None:
            refuse_missing(at)
        kind = self.kinds.get(require_text(word, at), self.other)
        if kind is None:
            refuse(at, self.refusal.format(repr(word[:64])), self.code)
        return kind.read(body, param)

    def schema(self) -> Schema:
        described = [self._describe_kind(kind) for kind in dict.fromkeys(self.kinds.values())]
        if self.other is not None:
            tag = {"type": "object", "properties": {self.tag: Text().schema()}}
            described.append({**tag, "required": [self.tag]})
        return either(*described)

    def _describe_kind(self, kind: JsonKind) -> Schema:
        known = [word for word, other in self.kinds.items() if other is kind]
        schema = kind.schema()
        tag: Schema = {"type": "string", "enum": known}
        is_optional = self.default in known
        properties = schema.get("properties", {}) | {
            self.tag: nullable(tag) if is_optional else tag
        }
        names = [name for name in schema.get("required", ()) if name != self.tag]
        names += [] if is_optional else [self.tag]
        return {**schema, "properties": properties, "required": names}


@dataclass(frozen=True, slots=True)
class Nested:
    """An object that older dialects have in a field of that name, and newer ones flat."""

    name: str
    kind: JsonKind

    def read(self, value: Any, param: str) -> Any:
        inner = require_object(value, param).get(self.name)
        if inner is None:
            return self.kind.read(value, param)
        return self.kind.read(inner, f"{param}.{self.name}")

    def schema(self) -> Schema:
        return {"type": "object"}


AGENT_ID: Final = Parsed(
    lambda value, param: parse_agent_id(require_text(value, param)),
    Text(pattern="^[A-Za-z0-9][A-Za-z0-9._:@+=~-]{0,127}$").schema(),
)
OPERATION_ID: Final = Parsed(
    lambda value, param: parse_operation_id(require_text(value, param)),
    Text(pattern="^[A-Za-z0-9_-]{8,64}$").schema(),
)


def refuse_missing(param: str) -> NoReturn:
    """Raise the 400 for an absent parameter."""
    message = f"Missing required parameter: '{param}'."
    raise RejectedError(message, code="missing_required_parameter", param=param)


def _refuse_unknown(name: str, known: list[str], prefix: str) -> NoReturn:
    close = get_close_matches(name[:QUOTED_NAME_CHARS_MAX], known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known)}"
    shown = prefix + name[:QUOTED_NAME_CHARS_MAX]
    message = f"Unknown parameter: '{shown}'; {hint}"
    raise RejectedError(message, code="unknown_parameter", param=shown)
