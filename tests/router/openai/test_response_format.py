"""Output formats, in OpenAI's and in vLLM's fields."""

import json

import pytest

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import OutputFormat, OutputKind
from router.openai.chat_request import parse_chat
from router.openai.completion_request import parse_completion

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "größer"}}}
SOURCE = '{"type":"object","properties":{"z":{"type":"string"},"a":{"const":"größer"}}}'
LOOSE = OutputFormat(OutputKind.JSON_SCHEMA, SOURCE, is_strict=False)
ANY = OutputFormat(OutputKind.JSON_OBJECT)


def output_of(body):
    whole = {"model": "m", "messages": [{"role": "user", "content": "a"}], **body}
    chat = parse_chat({}, whole).sampling.output
    assert parse_completion({}, {"model": "m", "prompt": "a", **body}).sampling.output == chat
    return chat


def response(**form):
    return {"response_format": form}


GOOD = [
    ({}, None),
    (response(type="text"), None),
    ({"response_format": None, "structured_outputs": None}, None),
    (response(type="json_object"), ANY),
    (response(type="json_object", schema=SCHEMA), LOOSE),
    (response(type="json_schema", json_schema={"name": "n", "schema": SCHEMA}), LOOSE),
    (
        response(type="json_schema", json_schema={"name": "n", "schema": SCHEMA, "strict": True}),
        OutputFormat(OutputKind.JSON_SCHEMA, SOURCE),
    ),
    (response(type="json_schema", json_schema={"name": "n", "strict": None}), ANY),
    ({"guided_json": SCHEMA}, LOOSE),
    ({"guided_json": SOURCE}, LOOSE),
    ({"guided_regex": "[a-z]"}, OutputFormat(OutputKind.REGEX, "[a-z]")),
    ({"guided_choice": ["a", "ö"]}, OutputFormat(OutputKind.CHOICE, '["a", "ö"]')),
    ({"guided_grammar": 'start: "a"'}, OutputFormat(OutputKind.GRAMMAR, 'start: "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, LOOSE),
    ({"structured_outputs": {"json_object": True}}, ANY),
    ({"structured_outputs": {"json_object": False, "regex": None}}, None),
    ({"structured_outputs": {"choice": ["a"]}}, OutputFormat(OutputKind.CHOICE, '["a"]')),
]


@pytest.mark.parametrize(("body", "expected"), GOOD, ids=str)
def test_response_format_is_read(body, expected):
    assert output_of(body) == expected


def schema(**more):
    return response(type="json_schema", json_schema={"name": "n", **more})


BAD = [
    ("response_format", {"response_format": "json"}, "invalid_type"),
    ("response_format.type", response(), "missing_required_parameter"),
    ("response_format.type", response(type="yaml"), "invalid_value"),
    ("response_format.type", response(type=3), "invalid_type"),
    ("response_format.json_schema", response(type="json_schema"), "missing_required_parameter"),
    ("response_format.json_schema", response(type="json_schema", json_schema=[]), "invalid_type"),
    ("response_format.json_schema.strict", schema(strict="yes", schema={}), "invalid_type"),
    ("response_format.json_schema.name", schema(name="x" * 513), "invalid_value"),
    ("response_format", schema(schema=["string"]), "invalid_format"),
    ("response_format", schema(schema={"anyOf": [{}] * 129}), "invalid_format"),
    ("guided_json", {"guided_json": 3}, "invalid_type"),
    ("response_format", {"guided_json": "{"}, "invalid_format"),
    ("guided_choice", {"guided_choice": "a"}, "invalid_type"),
    ("guided_choice", {"guided_choice": ["a"] * 1_001}, "invalid_value"),
    ("response_format", {"guided_choice": []}, "invalid_format"),
    ("guided_regex", {"guided_regex": ["a"]}, "invalid_type"),
    ("response_format", {"guided_regex": ""}, "invalid_format"),
    ("structured_outputs", {"structured_outputs": "json"}, "invalid_type"),
    ("structured_outputs.regex", {"structured_outputs": {"regex": 1}}, "invalid_type"),
    ("structured_outputs.json_object", {"structured_outputs": {"json_object": 1}}, "invalid_type"),
    ("guided_regex", {"guided_regex": "a", **response(type="json_object")}, "invalid_value"),
]


@pytest.mark.parametrize(("param", "body", "code"), BAD, ids=lambda x: str(x)[:60])
def test_invalid_format_is_rejected_with_its_parameter(param, body, code):
    with pytest.raises(RejectedError) as caught:
        output_of(body)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert int(caught.value.status) == 400


def test_property_order_is_preserved():
    output = output_of({"guided_json": SCHEMA})
    assert list(json.loads(output.source)["properties"]) == ["z", "a"]
