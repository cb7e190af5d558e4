"""Kinds of values in a scenario: each parses a YAML node and returns its own JSON schema.

Parser and schema use the same table, the fields of the classes in `scenario.py`, so they cannot
differ. A parser reports an invalid value and continues with a valid one, so that one pass finds
all errors.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from functools import cache
from re import Pattern
from typing import Any, Protocol, TypeAlias

from fabric.errors import RejectedError
from router.limits import SCENARIO_PATH_CHARS_MAX, SCENARIO_TEXT_CHARS_MAX
from router.scenario.diagnostics import Diagnostics, Path, shorten, suggest
from router.scenario.template import TemplateError, TextTemplate, parse_template, verbatim
from router.scenario.yaml_tree import YamlNode, plain

Schema: TypeAlias = dict[str, Any]
FileReader: TypeAlias = Callable[[str], str]  # returns a file's text; raises RejectedError

_KIND, _DESCRIPTION, _YAML_NAME = "kind", "description", "yaml_name"


@dataclass(frozen=True, slots=True)
class Reading:
    """Context of parsing a scenario: its diagnostics and its text files."""

    diagnostics: Diagnostics
    files: FileReader

    def report(self, node: YamlNode, path: Path, text: str) -> None:
        self.diagnostics.add(node.place, path, text)


class ValueKind(Protocol):
    """Kind of a field's value: its parser and its JSON schema."""

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any: ...

    def schema(self) -> Schema: ...


def scenario_field(
    kind: ValueKind, description: str, *, default: Any = MISSING, called: str = ""
) -> Any:
    """Declare a field of a scenario's class: its kind, its description, its name in YAML."""
    metadata = {_KIND: kind, _DESCRIPTION: description, _YAML_NAME: called}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def _is_required(declared: Field[Any]) -> bool:
    return declared.default is MISSING and declared.default_factory is MISSING


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text without placeholders."""

    chars_max: int = SCENARIO_TEXT_CHARS_MAX
    pattern: Pattern[str] | None = None
    rule: str = ""  # the pattern in words

    def read(self, node: YamlNode, path: Path, reading: Reading) -> str:
        if not isinstance(node.value, str):
            hint = "; put it in quotes" if isinstance(node.value, bool | int | float) else ""
            reading.report(node, path, f"expected text, got {_describe_node(node)}{hint}")
            return ""
        self.check(node.value, node, path, reading)
        return node.value

    def check(self, text: str, node: YamlNode, path: Path, reading: Reading) -> None:
        if not text:
            reading.report(node, path, "expected text, got an empty string")
        elif len(text) > self.chars_max:
            reading.report(node, path, f"must have at most {self.chars_max:,} characters")
        elif self.pattern is not None and not self.pattern.fullmatch(text):
            reading.report(node, path, f"'{shorten(text)}' is invalid: {self.rule}")

    def schema(self) -> Schema:
        schema: Schema = {"type": "string", "minLength": 1, "maxLength": self.chars_max}
        if self.pattern is not None:
            schema["pattern"] = f"^(?:{self.pattern.pattern})$"
        return schema


@dataclass(frozen=True, slots=True)
class TemplateText:
    """Text with placeholders, or a file whose text has none."""

    def read(self, node: YamlNode, path: Path, reading: Reading) -> TextTemplate:
        if isinstance(node.value, dict):
            name = _FILE.read(node, path, reading).file
            return verbatim(_from_file(name, node, path, reading) if name else "")
        text = _TEXT.read(node, path, reading)
        try:
            return parse_template(text)
        except TemplateError as error:
            reading.report(node, path, str(error))
            return verbatim(text)

    def schema(self) -> Schema:
        return {"anyOf": [_TEXT.schema(), _FILE.schema()]}


def _from_file(name: str, node: YamlNode, path: Path, reading: Reading) -> str:
    try:
        return reading.files(name)
    except RejectedError as error:
        reading.report(node, (*path, "file"), error.message)
        return ""


@dataclass(frozen=True, slots=True)
class IntegerRange:
    """Integer within bounds."""

    low: int
    high: int

    def read(self, node: YamlNode, path: Path, reading: Reading) -> int:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int):
            reading.report(node, path, f"expected a whole number, got {_describe_node(node)}")
            return self.low
        if not self.low <= value <= self.high:
            reading.report(node, path, f"must be between {self.low} and {self.high:,}")
            return self.low
        return value

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Number within bounds."""

    low: float
    high: float

    def read(self, node: YamlNode, path: Path, reading: Reading) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            reading.report(node, path, f"expected a number, got {_describe_node(node)}")
            return self.low
        if not self.low <= value <= self.high:
            reading.report(node, path, f"must be between {self.low:g} and {self.high:g}")
            return self.low
        return float(value)

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class EnumMember:
    """Member of an enumeration."""

    words: type[StrEnum]

    def read(self, node: YamlNode, path: Path, reading: Reading) -> StrEnum:
        known = [word.value for word in self.words]
        if node.value not in known:
            wrong = (
                f"'{shorten(node.value)}'" if isinstance(node.value, str) else _describe_node(node)
            )
            reading.report(node, path, f"expected {' or '.join(known)}, got {wrong}")
            return next(iter(self.words))
        return self.words(node.value)

    def schema(self) -> Schema:
        return {"enum": [word.value for word in self.words]}


@dataclass(frozen=True, slots=True)
class ListOf:
    """List of values of one kind."""

    of: ValueKind
    most: int
    fewest: int = 0
    is_unique: bool = True

    def read(self, node: YamlNode, path: Path, reading: Reading) -> tuple[Any, ...]:
        if not isinstance(node.value, list):
            reading.report(node, path, f"expected a list, got {_describe_node(node)}")
            return ()
        if not self.fewest <= len(node.value) <= self.most:
            bounds = f"{self.fewest} to {self.most}"
            reading.report(node, path, f"expected {bounds} items, got {len(node.value)}")
        values = []
        for at, item in enumerate(node.value[: self.most]):
            value = self.of.read(item, (*path, at), reading)
            if self.is_unique and value in values:
                reading.report(item, (*path, at), f"'{shorten(str(value))}' occurs twice")
            values.append(value)
        return tuple(values)

    def schema(self) -> Schema:
        schema: Schema = {"type": "array", "items": self.of.schema(), "maxItems": self.most}
        schema |= {"minItems": self.fewest} if self.fewest else {}
        return schema | ({"uniqueItems": True} if self.is_unique else {})


@dataclass(frozen=True, slots=True)
class MapOf:
    """Map from names that the author chooses to values of one kind."""

    of: ValueKind
    most: int
    names: PlainText
    fewest: int = 0

    def read(self, node: YamlNode, path: Path, reading: Reading) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            reading.report(node, path, f"expected a map of names, got {_describe_node(node)}")
            return {}
        if not self.fewest <= len(node.value) <= self.most:
            bounds = f"{self.fewest} to {self.most}"
            reading.report(node, path, f"expected {bounds} entries, got {len(node.value)}")
        values = {}
        for name, child in list(node.value.items())[: self.most]:
            key = YamlNode(name, node.key_places[name])
            self.names.check(name, key, (*path, name), reading)
            values[name] = self.of.read(child, (*path, name), reading)
        return values

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": self.names.schema(),
            "additionalProperties": self.of.schema(),
            "maxProperties": self.most,
        } | ({"minProperties": self.fewest} if self.fewest else {})


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Arbitrary JSON object: a tool's parameters, a call's arguments."""

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Mapping[str, Any]:
        if not isinstance(node.value, dict):
            reading.report(node, path, f"expected a map, got {_describe_node(node)}")
            return {}
        found: Mapping[str, Any] = plain(node)  # type: ignore[assignment]  # a map's is a dict
        return found

    def schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class Nullable:
    """Value or `null`."""

    of: ValueKind

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any:
        return None if node.value is None else self.of.read(node, path, reading)

    def schema(self) -> Schema:
        return {"anyOf": [self.of.schema(), {"type": "null"}]}


@dataclass(frozen=True, slots=True)
class OneOrMany:
    """One value, or a list of several."""

    one: ValueKind
    several: ListOf

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any:
        kind = self.several if isinstance(node.value, list) else self.one
        return kind.read(node, path, reading)

    def schema(self) -> Schema:
        return {"anyOf": [self.one.schema(), self.several.schema()]}


@dataclass(frozen=True, slots=True)
class Record:
    """Map with the fields of a class; exactly one of the fields in `one_of` must be present."""

    cls: type
    one_of: tuple[str, ...] = ()

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any:
        known = yaml_fields(self.cls)
        children = node.value
        if not isinstance(children, dict):
            names = shorten(", ".join(known), 200)
            reading.report(node, path, f"expected a map ({names}), got {_describe_node(node)}")
            children = {}
        else:
            self._check_names(node, children, path, reading)
        arguments = {}
        for name, declared in known.items():
            if name in children:
                child = children[name]
                arguments[declared.name] = declared.metadata[_KIND].read(
                    child, (*path, name), reading
                )
            elif _is_required(declared):
                arguments[declared.name] = _blank(declared.metadata[_KIND])
        return self.cls(**arguments)

    def _check_names(
        self, node: YamlNode, children: Mapping[str, YamlNode], path: Path, reading: Reading
    ) -> None:
        known = yaml_fields(self.cls)
        for name in children:
            if name not in known:
                place = YamlNode(None, node.key_places[name])
                text = f"unknown field; {suggest(name, known)}"
                reading.report(place, (*path, name), text)
        for name, declared in known.items():
            if _is_required(declared) and name not in children:
                reading.report(
                    node, path, f"'{name}' is missing: {declared.metadata[_DESCRIPTION]}"
                )
        if self.one_of and len(children.keys() & set(self.one_of)) != 1:
            reading.report(node, path, f"expected exactly one of {', '.join(self.one_of)}")

    def schema(self) -> Schema:
        known = yaml_fields(self.cls)
        properties = {
            name: {"description": declared.metadata[_DESCRIPTION]}
            | declared.metadata[_KIND].schema()
            for name, declared in known.items()
        }
        schema: Schema = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
        required = [name for name, declared in known.items() if _is_required(declared)]
        schema |= {"required": required} if required else {}
        if self.one_of:
            schema["oneOf"] = [{"required": [name]} for name in self.one_of]
        return schema


@cache
def yaml_fields(cls: type) -> dict[str, Field[Any]]:
    """Return a class's fields by their names in YAML."""
    return {declared.metadata[_YAML_NAME] or declared.name: declared for declared in fields(cls)}


def _blank(kind: ValueKind) -> Any:
    """Return a valid value for a missing field; the caller has reported that it is missing."""
    discarded = Reading(Diagnostics(""), lambda _: "")
    return kind.read(YamlNode(None, (1, 1)), (), discarded)


def _describe_node(node: YamlNode) -> str:
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"'{str(value).lower()}'"
    if isinstance(value, int | float):
        return f"the number {value:g}"
    if isinstance(value, str):
        return f"'{shorten(value, 40)}'"
    return "a list" if isinstance(value, list) else "a map"


@dataclass(frozen=True, slots=True)
class NamedFile:
    """File that holds a long text."""

    file: str = scenario_field(
        PlainText(SCENARIO_PATH_CHARS_MAX), "a file in the scenario's folder"
    )


_TEXT = PlainText()
_FILE = Record(NamedFile)
