"""Refused formats get plain reasons; unenforced keywords are known without a node."""

import re

import pytest

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import OutputKind
from fabric.turn.schema_keywords import ANNOTATIONS, ENFORCED, FORMATS, unenforced_keywords
from node.dialect.call_grammar import json_arguments
from node.dialect.tool_schema import ToolSpec
from node.grammar.expression import row
from node.grammar.reasons import client_reason, without_place
from tests.support.formats import lark, regex, schema
from tests.support.random_walk import walker

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
OBJECT = {"type": "object"}
REFUSED = [
    (schema({"$ref": "#"}), "leads back to itself"),
    (schema({"$ref": "#/$defs/no"}), "`$ref` points to '/$defs/no', which the schema lacks"),
    (schema({"$ref": "https://example.org/x"}), "`$ref` points to another document"),
    (schema({"oneOf": [TEXT, {**TEXT, "maxLength": 3}]}), "alternatives of `oneOf` overlap"),
    (schema({"not": {}, "uniqueItems": True}), "not supported: not, uniqueItems"),
    (schema({**TEXT, "format": "password"}), "the string format 'password' is not supported"),
    (schema({"allOf": [TEXT, NUMBER]}), "no value fits the schema"),
    (schema({**NUMBER, "minimum": 5, "maximum": 1}), "minimum is 5, maximum is 1"),
    (schema({**OBJECT, "properties": {"a": False}, "required": ["a"]}), "the property 'a'"),
    (schema({**TEXT, "pattern": "(a"}), "expression is invalid: a group is not closed"),
    (schema({**TEXT, "pattern": "(?=a)b"}), "look-ahead and look-behind are not supported"),
    (schema({"type": "text"}), "'text' is not a type of JSON"),
    (schema({"type": 5}), "`type` is neither a type nor a list of types"),
    (schema({"properties": []}), "`properties` is not an object"),
    (schema({"anyOf": [1]}), "a subschema is neither an object nor a boolean"),
    (schema({**NUMBER, "minimum": "x"}), "`minimum` has a value of the wrong type"),
    (schema({**NUMBER, "multipleOf": 0}), "`multipleOf` is not above 0"),
    (schema({**OBJECT, "patternProperties": {"a": TEXT, "b": NUMBER}}), "two `patternProperties`"),
    (lark("start: start"), "leads back to itself"),
    (lark('begin: "a"'), "there is no rule named start"),
    (lark('start: "a'), "line 1, column 10: it cannot be read"),
    (lark("start: b"), "line 1, column 8: the rule or terminal b is not defined"),
    (lark('start: "a"\nstart: "b"'), "line 2, column 8: start is defined twice"),
    (lark("start: <|foo|>"), "the model has no token <|foo|>"),
    (lark("start: A\nA: B\nB: A"), "A contains itself"),
    (lark("%import common.NOPE\nstart: NOPE"), "there is no terminal common.NOPE to import"),
    (lark("start: /a/ & /b/"), "name the rule in capitals"),
    (lark('start: "a"{5,1}'), "the bounds of a repetition are in the wrong order"),
    (regex("(a)\\1"), "references to groups are not supported"),
    (regex("a$b"), "anchors and word boundaries within it are not supported"),
    (regex("[z-a]"), "the ends of a character range are in the wrong order"),
    (regex("a{1000}{1000}"), "it allows too much at one place"),
]
# Names of the compiler's own parts and options, and how it marks places.
FOREIGN = re.compile(
    r"Extension|coerce|Unimplemented|Unsatisfiable|lexer|parse error|registry|retriev|f64|regexes"
    r"|\^|\d\(\d+\)|\s\|\s|Pointer|Resource|llguidance|SearchRegex"
)


@pytest.mark.parametrize(("output", "reason"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_format_has_a_reason_in_plain_words(output, reason):
    with pytest.raises(RejectedError) as caught:
        walker().compiler.compile(output)
    message = caught.value.message
    assert reason in message
    assert not FOREIGN.search(message), message
    if output.kind is not OutputKind.GRAMMAR:
        assert "line 1" not in message, "no places in a grammar that the client did not write"


@pytest.mark.parametrize(
    ("schema_", "reason"),
    [
        ({**TEXT, "pattern": "(?=a)b"}, "look-ahead and look-behind are not supported"),
        ({"oneOf": [TEXT, {**TEXT, "maxLength": 3}]}, "alternatives of `oneOf` overlap"),
        ({**TEXT, "format": "password"}, "the string format 'password' is not supported"),
    ],
)
def test_reason_ignores_the_grammar_quoted_by_the_compiler(schema_, reason):
    parameters = {**OBJECT, "properties": {"path": schema_}}
    tool = ToolSpec("read_file", parameters, is_strict=True)
    expression = row("<tool_call>\n", json_arguments(tool))
    with pytest.raises(RejectedError) as caught:
        walker().compiler.compile_expression(expression)
    assert reason in caught.value.message
    assert not FOREIGN.search(caught.value.message)


def test_unknown_compiler_error_has_a_generic_reason():
    assert client_reason("at 3(14): (NoCapacitor) gone 2 | start: not supported") == (
        "line 3, column 14: a part of it is not supported"
    )
    assert without_place("tools: line 3, column 14: gone") == "tools: gone"


VALUES = {
    **{key: [TEXT] for key in ("allOf", "anyOf", "oneOf", "prefixItems")},
    **{key: {"a": TEXT} for key in ("properties", "patternProperties", "$defs", "definitions")},
    **dict.fromkeys(("additionalProperties", "items", "additionalItems"), TEXT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), 1),
    **dict.fromkeys(("minProperties", "maxProperties", "minimum", "maximum"), 1),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"), 1),
    "type": "string",
    "enum": [1],
    "required": ["a"],
    "pattern": "a",
    "format": "date",
    "$ref": "#/$defs/a",
    "$schema": "http://json-schema.org/draft-07/schema#",
}
OTHERS = {
    "propertyNames": {"pattern": "^a"}, "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}}, "dependencies": {"a": ["b"]}, "unevaluatedItems": False,
    "unevaluatedProperties": False, "uniqueItems": True, "contains": {}, "minContains": 1,
    "maxContains": 1, "not": {}, "if": {}, "then": {}, "else": {}, "$dynamicRef": "#a",
    "$recursiveRef": "#", "$dynamicAnchor": "a",
}  # fmt: skip


def is_enforceable(value):
    try:
        walker().compiler.compile(schema(value))
    except RejectedError:
        return False
    return True


def test_enforced_keywords_agree_with_the_compiler():
    for key in ENFORCED | ANNOTATIONS:
        value = {key: VALUES.get(key, "x")} | ({"$defs": {"a": TEXT}} if key == "$ref" else {})
        assert is_enforceable(value), key
        assert unenforced_keywords(value, is_strict=True) == (), key
    for key, value in OTHERS.items():
        assert not is_enforceable({key: value}), key
        assert unenforced_keywords({key: value}, is_strict=False) == (key,)
    for format_ in FORMATS:
        assert is_enforceable({**TEXT, "format": format_})
    for format_ in ("password", "int64", "regex", "uri-reference", "idn-email"):
        assert not is_enforceable({**TEXT, "format": format_})
        assert unenforced_keywords({"format": format_}, is_strict=False) == (f"format={format_}",)
        assert unenforced_keywords({**NUMBER, "format": format_}, is_strict=False) == ()


def test_unenforced_keywords_are_found_in_schema_positions_only():
    nested = {
        **OBJECT,
        "properties": {"not": TEXT, "list": {"type": "array", "items": {"uniqueItems": True}}},
        "default": {"if": 1},
        "enum": [{"contains": 1}],
        "$defs": {"then": {"anyOf": [{"nullable": True}, {"oneOf": [TEXT, {"else": {}}]}]}},
        "additionalProperties": {"minContains": 1, "x-order": 5},
    }
    loose = ("uniqueItems", "nullable", "oneOf", "else", "minContains")
    assert unenforced_keywords(nested, is_strict=False) == loose
    strict = tuple(name for name in loose if name != "oneOf")
    assert unenforced_keywords(nested, is_strict=True) == strict
    for odd in (None, True, [], {"properties": 5, "anyOf": {}, "items": None}):
        assert unenforced_keywords(odd, is_strict=False) == ()
