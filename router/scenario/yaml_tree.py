"""YAML text as a tree of values with positions, restricted to a safe subset of YAML.

Anchors, aliases and merge keys are refused, so no file grows while it is read, and tags, so no text
selects a class. Plain scalars are resolved as in YAML 1.2: `no` and `12:30` are text.

The tree is built from parser events, not by `yaml.compose`: PyYAML's C loader composes recursively,
and text with some hundred thousand brackets overflows its stack before any limit could apply.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from router.limits import (
    SCENARIO_BYTES_MAX,
    SCENARIO_DEPTH_MAX,
    SCENARIO_NODES_MAX,
    SCENARIO_TEXT_CHARS_MAX,
)
from router.scenario.diagnostics import Diagnostics, Path, shorten

Place = tuple[int, int]
Value = None | bool | int | float | str | list["YamlNode"] | dict[str, "YamlNode"]

_UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_WHOLE = re.compile(r"[-+]?[0-9]{1,40}")
_BASED = re.compile(r"0x[0-9a-fA-F]{1,16}|0o[0-7]{1,21}")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_NUMBER = re.compile(
    r"[-+]?(?:[0-9]{1,18}\.[0-9]{0,18}|\.[0-9]{1,18}|[0-9]{1,18})(?:[eE][-+]?[0-9]{1,2})?"
)
_FORMS = (str.lower, str.capitalize, str.upper)
_WORDS: dict[str, bool | None] = {"": None, "~": None}
_WORDS |= {form("null"): None for form in _FORMS}
_WORDS |= {form("true"): True for form in _FORMS} | {form("false"): False for form in _FORMS}
# Advice, by a part of the problem's text in either of PyYAML's loaders.
_REMEDIES = (
    ("expected ','", "close the bracket, or put a text with braces, commas or ': ' in quotes"),
    ("mapping values", "put a text with ': ' in quotes, and a space after each 'name:'"),
    ("start any token", "indent with spaces, not tabs; quote a text that begins with @, ` or %"),
    ("indentation", "indent with spaces, not tabs"),
    ("incompatible YAML", "leave out the line that begins with %YAML"),
    ("directive", "leave out the line that begins with %, or put the text in quotes"),
    ("end of stream", "a quote is not closed"),
    ("escape", "use single quotes, or write \\\\ for \\"),
    ("alphabetic", "put a text that begins with * or & in quotes"),
    ("comment or line", "begin the text after | in the next line"),
    ("chomping", "begin the text after | in the next line"),
    ("expected", "indent this line like its neighbours, or put the whole text in quotes"),
)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where it is built


@dataclass(frozen=True, slots=True)
class YamlNode:
    """Value with its position; a map also has the positions of its keys."""

    value: Value
    place: Place
    key_places: dict[str, Place] = field(default_factory=dict)


class _UnreadableError(Exception):
    def __init__(self, place: Place, text: str) -> None:
        super().__init__(text)
        self.place = place
        self.text = text


def read_tree(raw: bytes, diagnostics: Diagnostics) -> YamlNode | None:
    """Return the only document; None, with a diagnostic, if it is unreadable."""
    try:
        return _Builder(_events(_text(raw)), diagnostics).document()
    except _UnreadableError as error:
        diagnostics.add(error.place, (), error.text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        diagnostics.add(place, (), _invalid_yaml(str(error.problem)))
    except yaml.YAMLError as error:
        diagnostics.add((1, 1), (), _invalid_yaml(str(error)))
    return None


def _invalid_yaml(problem: str) -> str:
    remedy = next((f"; {remedy}" for part, remedy in _REMEDIES if part in problem), "")
    return f"invalid YAML: {shorten(problem)}{remedy}"


def plain(node: YamlNode) -> object:
    """Return a value without positions, as in JSON."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def _text(raw: bytes) -> str:
    if len(raw) > SCENARIO_BYTES_MAX:
        size = f"{len(raw):,} bytes, more than {SCENARIO_BYTES_MAX:,}"
        raise _UnreadableError(
            (1, 1), f"the file has {size}; put long texts into files of their own"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        raise _UnreadableError(
            _place_after(before), "this byte is not UTF-8; save the file as UTF-8"
        ) from None
    found = _UNPRINTABLE.search(text)
    if found:
        character = f"U+{ord(found[0]):04X}"
        raise _UnreadableError(
            _place_after(text[: found.start()]), f"the character {character} is not allowed"
        )
    return text


def _place_after(text: str) -> Place:
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def _events(text: str) -> Iterator[yaml.Event]:
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
    return events


class _Builder:
    """Builder of a tree from events; it stops reading them at the first exceeded limit."""

    def __init__(self, events: Iterator[yaml.Event], diagnostics: Diagnostics) -> None:
        self._events = events
        self._diagnostics = diagnostics
        self._nodes = 0

    def document(self) -> YamlNode:
        next(self._events)  # the stream's start
        if isinstance(next(self._events), yaml.StreamEndEvent):
            raise _UnreadableError((1, 1), "the file is empty; begin with 'scenario: NAME'")
        root = self._node(next(self._events), (), SCENARIO_DEPTH_MAX)
        next(self._events)  # the document's end
        following = next(self._events)
        if not isinstance(following, yaml.StreamEndEvent):
            raise _UnreadableError(
                _place(following), "a second document begins; one file is one scenario"
            )
        return root

    def _node(self, event: yaml.Event, path: Path, depth: int) -> YamlNode:
        place = _place(event)
        self._nodes += 1
        if self._nodes > SCENARIO_NODES_MAX:
            raise _UnreadableError(
                place, f"more than {SCENARIO_NODES_MAX:,} values; make the scenario smaller"
            )
        if depth == 0:
            raise _UnreadableError(
                place,
                f"nested deeper than {SCENARIO_DEPTH_MAX} levels; quote a text with brackets",
            )
        self._refuse_links(event, place, path)
        if isinstance(event, yaml.ScalarEvent):
            return YamlNode(_scalar(event, place), place)
        if isinstance(event, yaml.SequenceStartEvent):
            return YamlNode(self._items(path, depth), place)
        if isinstance(event, yaml.MappingStartEvent):
            return self._map(place, path, depth)
        return YamlNode(None, place)  # an alias, which has a diagnostic

    def _refuse_links(self, event: yaml.Event, place: Place, path: Path) -> None:
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent):
            instead = "write it out, or use a variable"
            text = f"the alias '*{shorten(str(anchor))}' is not followed; {instead}"
            self._diagnostics.add(place, path, text)
        elif anchor is not None:
            text = f"the anchor '&{shorten(anchor)}' is not used here; leave it out"
            self._diagnostics.add(place, path, text)
        elif tag is not None:
            text = f"the tag '{shorten(tag)}' is not used here; put text in quotes instead"
            self._diagnostics.add(place, path, text)

    def _items(self, path: Path, depth: int) -> list[YamlNode]:
        items: list[YamlNode] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items)), depth - 1))
        return items

    def _map(self, place: Place, path: Path, depth: int) -> YamlNode:
        values: dict[str, YamlNode] = {}
        places: dict[str, Place] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key_place = _place(event)
            key = self._key(event, key_place, path)
            node = self._node(next(self._events), (*path, key), depth - 1)
            if key in values:
                first = f"the first is in line {places[key][0]}"
                self._diagnostics.add(key_place, (*path, key), f"duplicate key; {first}")
            else:
                values[key], places[key] = node, key_place
        return YamlNode(values, place, places)

    def _key(self, event: yaml.Event, place: Place, path: Path) -> str:
        if not isinstance(event, yaml.ScalarEvent):
            raise _UnreadableError(
                place,
                "a key must be text, not a list, map or alias; quote text that begins with { or [",
            )
        self._refuse_links(event, place, path)
        if event.value == "<<" and not event.style:
            self._diagnostics.add(place, path, "merge keys ('<<') are not followed; write it out")
        _scalar(event, place)
        return str(event.value)


def _place(event: yaml.Event) -> Place:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def _scalar(event: yaml.ScalarEvent, place: Place) -> Value:
    text = str(event.value)
    if len(text) > SCENARIO_TEXT_CHARS_MAX:
        size = f"{len(text):,} characters, more than {SCENARIO_TEXT_CHARS_MAX:,}"
        raise _UnreadableError(
            place, f"this text has {size}; put it into a file of its own (file: NAME)"
        )
    if event.style:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _NO_NUMBER.fullmatch(text):
        raise _UnreadableError(
            place, f"{text} is not allowed; write a finite number, or put text in quotes"
        )
    return float(text) if _NUMBER.fullmatch(text) else text
