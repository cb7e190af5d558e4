"""Kinds of values that a scenario's fields have: how each is read, and what editors are told.

Both come of one table (the fields of the classes in `scenario.py`), so that the reader and the JSON
schema cannot differ. A value that is wrong is complained about and read as well as it can be, so
that one reading finds all that is wrong.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from functools import cache
from re import Pattern
from typing import Any, Protocol, TypeAlias

from fabric.errors import RejectedError
from router.limits import SCENARIO_PATH_CHARS_MAX, SCENARIO_TEXT_CHARS_MAX
from router.scenario.complaints import Complaints, Path, meant, told
from router.scenario.template import TemplateError, TextTemplate, parse_template, verbatim
from router.scenario.yaml_tree import YamlNode, plain

Schema: TypeAlias = dict[str, Any]
TextFiles: TypeAlias = Callable[[str], str]  # returns a file's text; raises RejectedError

_KIND, _ABOUT, _CALLED = "kind", "about", "called"


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading one scenario needs: where complaints go, and where texts come from."""

    complaints: Complaints
    files: TextFiles

    def complain(self, node: YamlNode, path: Path, text: str) -> None:
        self.complaints.add(node.place, path, text)


class ValueKind(Protocol):
    """One kind of value."""

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any: ...

    def schema(self) -> Schema: ...


def given(kind: ValueKind, about: str, *, default: Any = MISSING, called: str = "") -> Any:
    """Declare a field of a scenario's class: its kind, what it is for, its name in YAML."""
    metadata = {_KIND: kind, _ABOUT: about, _CALLED: called}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def _is_required(own: Field[Any]) -> bool:
    return own.default is MISSING and own.default_factory is MISSING


@dataclass(frozen=True, slots=True)
class PlainText:
    """Words that are taken as they are."""

    chars_max: int = SCENARIO_TEXT_CHARS_MAX
    pattern: Pattern[str] | None = None
    rule: str = ""  # the pattern in words

    def read(self, node: YamlNode, path: Path, reading: Reading) -> str:
        if not isinstance(node.value, str):
            hint = "; put it in quotes" if isinstance(node.value, bool | int | float) else ""
            reading.complain(node, path, f"expected text, got {_kind_of(node)}{hint}")
            return ""
        self.check(node.value, node, path, reading)
        return node.value

    def check(self, text: str, node: YamlNode, path: Path, reading: Reading) -> None:
        if not text:
            reading.complain(node, path, "expected text, got none between the quotes")
        elif len(text) > self.chars_max:
            reading.complain(node, path, f"longer than {self.chars_max:,} characters")
        elif self.pattern is not None and not self.pattern.fullmatch(text):
            reading.complain(node, path, f"'{told(text)}' does not do: {self.rule}")

    def schema(self) -> Schema:
        made: Schema = {"type": "string", "minLength": 1, "maxLength": self.chars_max}
        if self.pattern is not None:
            made["pattern"] = f"^(?:{self.pattern.pattern})$"
        return made


@dataclass(frozen=True, slots=True)
class Wording:
    """A text with places to fill, or the name of a file that holds one without."""

    def read(self, node: YamlNode, path: Path, reading: Reading) -> TextTemplate:
        if isinstance(node.value, dict):
            name = _FILE.read(node, path, reading).file
            return verbatim(_from_file(name, node, path, reading) if name else "")
        text = _TEXT.read(node, path, reading)
        try:
            return parse_template(text)
        except TemplateError as error:
            reading.complain(node, path, str(error))
            return verbatim(text)

    def schema(self) -> Schema:
        return {"anyOf": [_TEXT.schema(), _FILE.schema()]}


def _from_file(name: str, node: YamlNode, path: Path, reading: Reading) -> str:
    try:
        return reading.files(name)
    except RejectedError as error:
        reading.complain(node, (*path, "file"), error.message)
        return ""


@dataclass(frozen=True, slots=True)
class Whole:
    """A number without a fraction."""

    low: int
    high: int

    def read(self, node: YamlNode, path: Path, reading: Reading) -> int:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int):
            reading.complain(node, path, f"expected a whole number, got {_kind_of(node)}")
            return self.low
        if not self.low <= value <= self.high:
            reading.complain(node, path, f"must be between {self.low} and {self.high:,}")
            return self.low
        return value

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Fraction:
    """A number that may have a fraction."""

    low: float
    high: float

    def read(self, node: YamlNode, path: Path, reading: Reading) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            reading.complain(node, path, f"expected a number, got {_kind_of(node)}")
            return self.low
        if not self.low <= value <= self.high:
            reading.complain(node, path, f"must be between {self.low:g} and {self.high:g}")
            return self.low
        return float(value)

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Word:
    """One of a few words."""

    words: type[StrEnum]

    def read(self, node: YamlNode, path: Path, reading: Reading) -> StrEnum:
        known = [word.value for word in self.words]
        if node.value not in known:
            wrong = f"'{told(node.value)}'" if isinstance(node.value, str) else _kind_of(node)
            reading.complain(node, path, f"expected {' or '.join(known)}, got {wrong}")
            return next(iter(self.words))
        return self.words(node.value)

    def schema(self) -> Schema:
        return {"enum": [word.value for word in self.words]}


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    of: ValueKind
    most: int
    fewest: int = 0
    is_unique: bool = True

    def read(self, node: YamlNode, path: Path, reading: Reading) -> tuple[Any, ...]:
        if not isinstance(node.value, list):
            reading.complain(node, path, f"expected a list, got {_kind_of(node)}")
            return ()
        if not self.fewest <= len(node.value) <= self.most:
            bounds = f"{self.fewest} to {self.most}"
            reading.complain(node, path, f"expected {bounds} items, got {len(node.value)}")
        found = []
        for at, item in enumerate(node.value[: self.most]):
            value = self.of.read(item, (*path, at), reading)
            if self.is_unique and value in found:
                reading.complain(item, (*path, at), f"'{told(str(value))}' stands here twice")
            found.append(value)
        return tuple(found)

    def schema(self) -> Schema:
        made: Schema = {"type": "array", "items": self.of.schema(), "maxItems": self.most}
        made |= {"minItems": self.fewest} if self.fewest else {}
        return made | ({"uniqueItems": True} if self.is_unique else {})


@dataclass(frozen=True, slots=True)
class Named:
    """A map with names of the author's own."""

    of: ValueKind
    most: int
    names: PlainText
    fewest: int = 0

    def read(self, node: YamlNode, path: Path, reading: Reading) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            reading.complain(node, path, f"expected a map of names, got {_kind_of(node)}")
            return {}
        if not self.fewest <= len(node.value) <= self.most:
            bounds = f"{self.fewest} to {self.most}"
            reading.complain(node, path, f"expected {bounds} entries, got {len(node.value)}")
        found = {}
        for name, child in list(node.value.items())[: self.most]:
            key = YamlNode(name, node.key_places[name])
            self.names.check(name, key, (*path, name), reading)
            found[name] = self.of.read(child, (*path, name), reading)
        return found

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": self.names.schema(),
            "additionalProperties": self.of.schema(),
            "maxProperties": self.most,
        } | ({"minProperties": self.fewest} if self.fewest else {})


@dataclass(frozen=True, slots=True)
class Anything:
    """Any JSON object: a tool's parameters, a call's arguments."""

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Mapping[str, Any]:
        if not isinstance(node.value, dict):
            reading.complain(node, path, f"expected a map, got {_kind_of(node)}")
            return {}
        found: Mapping[str, Any] = plain(node)  # type: ignore[assignment]  # a map's is a dict
        return found

    def schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class OrNothing:
    """A value, or `null`."""

    of: ValueKind

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any:
        return None if node.value is None else self.of.read(node, path, reading)

    def schema(self) -> Schema:
        return {"anyOf": [self.of.schema(), {"type": "null"}]}


@dataclass(frozen=True, slots=True)
class OneOrItems:
    """A list, or one value that stands for itself."""

    one: ValueKind
    several: Items

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any:
        kind = self.several if isinstance(node.value, list) else self.one
        return kind.read(node, path, reading)

    def schema(self) -> Schema:
        return {"anyOf": [self.one.schema(), self.several.schema()]}


@dataclass(frozen=True, slots=True)
class Record:
    """A map with the fields of a class; of those in `one_of` it has exactly one."""

    cls: type
    one_of: tuple[str, ...] = ()

    def read(self, node: YamlNode, path: Path, reading: Reading) -> Any:
        known = yaml_fields(self.cls)
        children = node.value
        if not isinstance(children, dict):
            names = told(", ".join(known), 200)
            reading.complain(node, path, f"expected a map ({names}), got {_kind_of(node)}")
            children = {}
        else:
            self._check_names(node, children, path, reading)
        arguments = {}
        for name, own in known.items():
            if name in children:
                child = children[name]
                arguments[own.name] = own.metadata[_KIND].read(child, (*path, name), reading)
            elif _is_required(own):
                arguments[own.name] = _blank(own.metadata[_KIND])
        return self.cls(**arguments)

    def _check_names(
        self, node: YamlNode, children: Mapping[str, YamlNode], path: Path, reading: Reading
    ) -> None:
        known = yaml_fields(self.cls)
        for name in children:
            if name not in known:
                place = YamlNode(None, node.key_places[name])
                text = f"there is no such field; {meant(name, known)}"
                reading.complain(place, (*path, name), text)
        for name, own in known.items():
            if _is_required(own) and name not in children:
                reading.complain(node, path, f"'{name}' is missing: {own.metadata[_ABOUT]}")
        if self.one_of and len(children.keys() & set(self.one_of)) != 1:
            reading.complain(node, path, f"expected exactly one of {', '.join(self.one_of)}")

    def schema(self) -> Schema:
        known = yaml_fields(self.cls)
        properties = {
            name: {"description": own.metadata[_ABOUT]} | own.metadata[_KIND].schema()
            for name, own in known.items()
        }
        made: Schema = {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
        }
        required = [name for name, own in known.items() if _is_required(own)]
        made |= {"required": required} if required else {}
        if self.one_of:
            made["oneOf"] = [{"required": [name]} for name in self.one_of]
        return made


@cache
def yaml_fields(cls: type) -> dict[str, Field[Any]]:
    """Return a class's fields by their names in YAML."""
    return {own.metadata[_CALLED] or own.name: own for own in fields(cls)}


def _blank(kind: ValueKind) -> Any:
    """Return what a missing field is read as, behind the complaint about it."""
    silent = Reading(Complaints(""), lambda _: "")
    return kind.read(YamlNode(None, (1, 1)), (), silent)


def _kind_of(node: YamlNode) -> str:
    value = node.value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"'{str(value).lower()}'"
    if isinstance(value, int | float):
        return f"the number {value:g}"
    if isinstance(value, str):
        return f"'{told(value, 40)}'"
    return "a list" if isinstance(value, list) else "a map"


@dataclass(frozen=True, slots=True)
class NamedFile:
    """File that holds a long text."""

    file: str = given(PlainText(SCENARIO_PATH_CHARS_MAX), "a file in the scenario's folder")


_TEXT = PlainText()
_FILE = Record(NamedFile)
