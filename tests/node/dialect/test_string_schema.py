"""Schemas of raw texts between tags."""

import re

import pytest

from fabric.errors import RejectedError
from node.dialect.string_schema import StringOption, string_options
from node.dialect.tool_schema import ToolSpec, argument_types, tool_arguments
from node.limits import CALL_TEXT_COUNTED_CHARS_MAX

ROOT = {"$defs": {"short": {"type": "string", "maxLength": 2}, "loop": {"$ref": "#/$defs/loop"}}}


def texts(schema, *, is_strict=True):
    return string_options(ToolSpec("f", ROOT, is_strict), schema)


def fits(schema, text):
    found = texts(schema)
    return any(
        text == each.constant
        if each.constant is not None
        else all(re.fullmatch(p.replace("(?s:.)", r"[\s\S]"), text) for p in each.patterns)
        for each in found
    )


CASES = [
    ({"type": "string"}, ["", "a\nb"], []),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "\n\n"], ["", "abc"]),
    ({"enum": ["a", 3, "b"]}, ["a", "b"], ["3", "c"]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"type": "string", "pattern": "b"}, ["b", "abc"], ["a"]),
    ({"type": "string", "pattern": "^b"}, ["b", "bc"], ["ab"]),
    ({"type": "string", "pattern": "b$"}, ["b", "ab"], ["bc"]),
    ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    ({"type": "string", "pattern": r"^[|^$]\\$"}, ["|\\", "$\\"], ["a\\", "|"]),
    ({"type": "string", "pattern": r"^a\$"}, ["a$", "a$b"], ["a"]),
    ({"type": "string", "pattern": "^(a|b)$", "maxLength": 1}, ["a", "b"], ["c", ""]),
    ({"$ref": "#/$defs/short"}, ["ab"], ["abc"]),
    ({"anyOf": [{"const": "long word"}, {"$ref": "#/$defs/short"}]}, ["long word", "a"], ["abc"]),
    ({"allOf": [{"maxLength": 3}, {"pattern": "^a"}], "minLength": 2}, ["ab"], ["a", "abcd", "b"]),
    ({"format": "date"}, ["2026-11-23"], ["2026-13-01", "today"]),
    ({"format": "date-time"}, ["2026-11-23T09:30:00Z"], ["2026-11-23"]),
    ({"format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["x"]),
    ({"format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"]),
    ({"format": "email"}, ["ada@example.org"], ["ada"]),
    ({"$ref": "#/$defs/loop"}, ["a"], []),
    ({"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 2}]}, ["ab"], ["abc"]),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), CASES, ids=str)
def test_string_schema_accepts_matching_texts_only(schema, fitting, others):
    assert [text for text in fitting if not fits(schema, text)] == []
    assert [text for text in others if fits(schema, text)] == []


UNKNOWN = [
    {"type": "string", "format": "colour"},
    {"type": "string", "contentEncoding": "base64"},
    {"type": "string", "pattern": r"a\bc"},
    {"type": "string", "pattern": "(^a)b"},
    {"anyOf": [{"type": "string"}], "allOf": [{"type": "string"}]},
    {"type": "string", "maxLength": CALL_TEXT_COUNTED_CHARS_MAX + 1},
    {"type": "string", "minLength": CALL_TEXT_COUNTED_CHARS_MAX + 1},
]


@pytest.mark.parametrize("schema", UNKNOWN, ids=str)
def test_unenforced_keywords_are_refused_for_strict_tools(schema):
    with pytest.raises(RejectedError, match="the tool 'f'"):
        texts(schema)
    assert texts(schema, is_strict=False)[0] in (StringOption(), StringOption(None, ("(?s:.*)",)))


def test_tool_arguments_are_listed_with_their_types():
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/short"}, "no": False, "b": True},
        "required": ["b", "c", 3],
        "additionalProperties": {"type": "integer"},
        **ROOT,
    }
    found = tool_arguments(ToolSpec("f", schema))
    assert [(each.key, each.is_required) for each in found] == [
        *(("a", False), ("b", True), ("c", True)),
    ]
    kinds = [argument_types(schema, key) for key in ("a", "b", "c", "d")]
    assert kinds == [{"string"}, set(), {"integer"}, {"integer"}]
    with pytest.raises(RejectedError, match="'minProperties' is not enforced"):
        tool_arguments(ToolSpec("f", {**schema, "minProperties": 2}, is_strict=True))


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"string", "integer"}),
        ({"enum": ["a", 1, None, True]}, {"string", "integer", "null", "boolean"}),
        ({"const": {"a": 1}}, {"object"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "http://example.org/"}, set()),
        (True, set()),
        (None, set()),
    ],
    ids=lambda value: None if isinstance(value, set) else str(value),
)
def test_argument_types_follow_the_schema(schema, kinds):
    assert argument_types({"properties": {"a": schema}, **ROOT}, "a") == kinds
