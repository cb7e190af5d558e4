"""Tools as chat templates get them: with an object of properties for every client schema.

Calls follow the schema as the client sent it.
"""

import json
import random

import jsonschema
import pytest

from fabric.turn.answer_constraints import CallChoice
from node.dialect.call_grammar import json_arguments
from node.dialect.tool_schema import callable_tools, plain_schema, template_tools
from tests.support.chat_models import QWEN3, QWEN_SPECIALS, chat_tokenizer
from tests.support.random_walk import walker

USER = {"role": "user", "content": "Read it."}
# Shaped as those that list the fields of every argument.
FIELDS = (
    "{% for tool in tools or [] %}{% set f = tool.function %}<tool {{ f.name }}>"
    "{% if f.description is defined %}{{ f.description | trim }}{% endif %}"
    "{% for name, fields in f.parameters.properties | items %}\n{{ name }}:"
    "{{ fields.type | string if fields.type is defined else '' }}"
    "{% for key in fields if key not in ('type', 'properties') %} {{ key }}{% endfor %}"
    "{% for key in fields.properties or {} %}"
    "{% for inner in fields.properties[key] %} {{ key }}.{{ inner }}{% endfor %}{% endfor %}"
    "{% endfor %}{% if f.parameters.required is defined %}"
    "{% for name in f.parameters.required %}!{{ name }}{% endfor %}{% endif %}"
    "</tool>\n{% endfor %}{% for m in messages %}{{ m.content }}\n{% endfor %}"
)
TEXT = {"type": "string", "description": "A path."}
PLAIN = {"type": "object", "properties": {"path": TEXT}, "required": ["path"]}
ABSENT = object()
# Parameters as sent → properties as templates read them.
PARAMETERS = {
    "absent": (ABSENT, {}),
    "null": (None, {}),
    "empty": ({}, {}),
    "no properties": ({"type": "object"}, {}),
    "properties null": ({"type": "object", "properties": None}, {}),
    "required null": ({**PLAIN, "required": None}, {"path": TEXT}),
    "no type": ({"properties": {"path": TEXT}}, {"path": TEXT}),
    "a property that is true": ({**PLAIN, "properties": {"path": True}}, {"path": {}}),
    "a property that is false": (
        {"type": "object", "properties": {"path": TEXT, "old": False}},
        {"path": TEXT},
    ),
    "a property without type": ({**PLAIN, "properties": {"path": {}}}, {"path": {}}),
    "a list of types": (
        {**PLAIN, "properties": {"path": {"type": ["string", "null"]}}},
        {"path": {"type": ["string", "null"]}},
    ),
    "null keywords": (
        {**PLAIN, "properties": {"path": {**TEXT, "enum": None, "items": None, "default": None}}},
        {"path": {**TEXT, "default": None}},
    ),
    "nested": (
        {
            **PLAIN,
            "properties": {
                "path": {
                    "type": "object",
                    "properties": {"a": True, "b": None, "c": False, "d": {"properties": None}},
                },
            },
        },
        {"path": {"type": "object", "properties": {"a": {}, "b": {}, "d": {}}}},
    ),
    "any items": (
        {**PLAIN, "properties": {"path": {"type": "array", "items": True}}},
        {"path": {"type": "array", "items": {}}},
    ),
    "alternatives": (
        {**PLAIN, "properties": {"path": {"anyOf": [TEXT, True, False, {"type": "null"}]}}},
        {"path": {"anyOf": [TEXT, {}, {"type": "null"}]}},
    ),
}


def tool(parameters, **more):
    schema = {} if parameters is ABSENT else {"parameters": parameters}
    return {"type": "function", "function": {"name": "read_file", **more, **schema}}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_shape_of_parameters_becomes_an_object_of_properties(name):
    parameters, properties = PARAMETERS[name]
    (shown,) = template_tools([tool(parameters)])

    assert shown["function"]["parameters"]["type"] == "object"
    assert shown["function"]["parameters"]["properties"] == properties
    assert all(value is not None for value in shown["function"]["parameters"].values())


@pytest.mark.parametrize("name", PARAMETERS)
def test_templates_render_every_shape_of_parameters(tmp_path, name):
    for template in (FIELDS, QWEN3):
        tokenizer = chat_tokenizer(tmp_path, template, QWEN_SPECIALS)
        text = tokenizer.render([USER], [tool(PARAMETERS[name][0], description=None)], {})
        assert "read_file" in text
        assert "None" not in text


def test_common_tools_are_passed_unchanged():
    for parameters in (PLAIN, {**PLAIN, "additionalProperties": False, "$defs": {"x": TEXT}}):
        tools = [tool(parameters, description="Reads.", strict=True)]
        assert json.dumps(template_tools(tools)) == json.dumps(tools)
    assert template_tools(None) is None
    assert template_tools(["x", {"name": "y"}, {"function": 5}]) == [
        "x",
        {"name": "y"},
        {"function": 5},
    ]


def test_constants_are_not_read_as_keywords():
    schema = {"const": {"properties": None, "items": True}, "enum": [None, True]}
    assert plain_schema(schema, for_template=True) == schema


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("name", PARAMETERS)
def test_call_grammar_follows_the_schema_as_sent(name, is_strict):
    parameters = PARAMETERS[name][0]
    strict = ("read_file",) if is_strict else ()
    (spec,) = callable_tools([tool(parameters)], CallChoice(True, strict=strict))
    grammar = walker().compiler.compile_expression(json_arguments(spec))
    rng, written = random.Random(7), 0
    validator = {} if parameters in (ABSENT, None) else plain_schema(parameters)
    for _ in range(20):
        text = walker().walk(grammar, rng)
        if text is not None:
            jsonschema.validate(json.loads(text), validator)
            written += 1
    assert written
    is_closed = parameters is ABSENT or parameters is None or bool(validator.get("properties"))
    assert walker().accepts(grammar, '{"other": 1}') is not is_closed
    if name == "a property that is false":
        assert walker().accepts(grammar, '{"path": "a"}')
        assert not walker().accepts(grammar, '{"old": 1}')
    if name == "a property that is true":
        assert walker().accepts(grammar, '{"path": [1]}')
