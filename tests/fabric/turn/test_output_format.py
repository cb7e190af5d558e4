"""Output formats: parsed, bounded, and unchanged after a round trip."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.codec import dump_json, from_plain, parse_json
from fabric.errors import RejectedError
from fabric.ids import AgentId, OperationId, TenantId
from fabric.limits import GRAMMAR_BYTES_MAX, RULES_CHARS_MAX, SCHEMA_DEPTH_MAX
from fabric.turn.answer_constraints import OutputFormat, OutputKind, choices_of, tags_of
from fabric.turn.generation import GenerateRequest, Identity, IdentityKind, Sampling

FORMATS = st.builds(
    OutputFormat, st.sampled_from(list(OutputKind)), st.text(max_size=200), st.booleans()
)


def schema(value):
    return OutputFormat(OutputKind.JSON_SCHEMA, json.dumps(value))


def nested(levels):
    value = {"type": "string"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


def tag(**changes):
    plain = {"trigger": "<f", "begin": "<f=go>", "schema": {"type": "object"}, "end": "</f>"}
    return plain | changes


GOOD = {
    "object": OutputFormat(OutputKind.JSON_OBJECT),
    "schema": schema({"type": "object", "properties": {"enum": {"type": "string"}}}),
    "true": schema(True),
    "deep": schema(nested(SCHEMA_DEPTH_MAX - 2)),
    "regex": OutputFormat(OutputKind.REGEX, "[a-z]+"),
    "grammar": OutputFormat(OutputKind.GRAMMAR, 'start: "a"'),
    "choice": OutputFormat(OutputKind.CHOICE, '["yes", "no"]'),
    "tags": OutputFormat(OutputKind.TAGS, json.dumps([tag()])),
}
BAD = {
    "no JSON": OutputFormat(OutputKind.JSON_SCHEMA, "{"),
    "a key twice": OutputFormat(OutputKind.JSON_SCHEMA, '{"a": 1, "a": 2}'),
    "no schema": schema(["string"]),
    "large": schema({"description": "x" * GRAMMAR_BYTES_MAX}),
    "deep": schema(nested(SCHEMA_DEPTH_MAX)),
    "long enum": schema({"enum": list(range(1_001))}),
    "long text": schema({"const": "x" * 4_097}),
    "many objects": schema({"enum": [{"a": n} for n in range(129)]}),
    "many properties": schema({"properties": {f"p{n}": {} for n in range(513)}}),
    "many branches": schema({"anyOf": [{}] * 129}),
    "many patterns": schema({"patternProperties": {f"p{n}": {} for n in range(17)}}),
    "long pattern": schema({"pattern": "a" * 1_025}),
    "long name": schema({"properties": {"a" * 1_025: {}}}),
    "no regex": OutputFormat(OutputKind.REGEX, ""),
    "long regex": OutputFormat(OutputKind.REGEX, "a" * (RULES_CHARS_MAX + 1)),
    "long grammar": OutputFormat(OutputKind.GRAMMAR, "#" * (RULES_CHARS_MAX + 1)),
    "no choice": OutputFormat(OutputKind.CHOICE, "[]"),
    "empty choice": OutputFormat(OutputKind.CHOICE, '["a", ""]'),
    "a choice of numbers": OutputFormat(OutputKind.CHOICE, "[1]"),
    "choices in an object": OutputFormat(OutputKind.CHOICE, '{"a": 1}'),
    "no tags": OutputFormat(OutputKind.TAGS, "[]"),
    "half a tag": OutputFormat(OutputKind.TAGS, '[{"trigger": "<"}]'),
    "a tag elsewhere": OutputFormat(OutputKind.TAGS, json.dumps([tag(begin="f")])),
    "a tag of anything": OutputFormat(OutputKind.TAGS, json.dumps([tag(schema=[])])),
    "a deep tag": OutputFormat(OutputKind.TAGS, json.dumps([tag(schema=nested(60))])),
}


@pytest.mark.parametrize("name", GOOD)
def test_output_format_of_ordinary_size_is_accepted(name):
    GOOD[name].check()


@pytest.mark.parametrize("name", BAD)
def test_invalid_or_oversized_output_format_is_rejected(name):
    with pytest.raises(RejectedError) as caught:
        BAD[name].check()
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 200


@given(output=FORMATS)
@settings(max_examples=300)
def test_check_raises_only_rejected_error(output):
    with suppress(RejectedError):
        output.check()


@given(output=FORMATS)
@settings(max_examples=100)
def test_output_format_round_trips_in_a_request(output):
    sampling = Sampling(output=output)
    identity = Identity(IdentityKind.AGENT, AgentId("mira"))
    request = GenerateRequest(
        OperationId("op"), TenantId("default"), identity, sampling, prompt="a"
    )
    assert from_plain(GenerateRequest, parse_json(dump_json(request))).sampling == sampling


def test_sampling_without_output_field_has_no_format():
    plain = parse_json(dump_json(Sampling()))
    del plain["output"]
    assert from_plain(Sampling, plain).output is None


def test_choices_and_tags_are_parsed():
    assert choices_of(GOOD["choice"]) == ("yes", "no")
    (only,) = tags_of(GOOD["tags"])
    assert (only.trigger, only.begin, only.end) == ("<f", "<f=go>", "</f>")
