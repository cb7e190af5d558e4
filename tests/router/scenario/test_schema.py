"""The JSON schema for editors agrees with the reader."""

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from router.scenario.diagnostics import Diagnostics, ScenarioError
from router.scenario.reader import json_schema, read_scenario
from router.scenario.yaml_tree import plain, read_tree
from tests.router.scenario.small_scenario import SMALL

VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def as_editors_see(text):
    return plain(read_tree(text.encode(), Diagnostics("x")))


def test_schema_is_valid_and_every_field_has_a_description():
    jsonschema.Draft202012Validator.check_schema(json_schema())

    def described(schema):
        for name, field in schema.get("properties", {}).items():
            assert field["description"], name
            described(field)

    described(json_schema())


def test_schema_accepts_valid_scenario():
    VALIDATOR.validate(as_editors_see(SMALL))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scenario: cells\n", ""),
        ("scenario: cells", "scenario: Big Cells"),
        ("scenario: cells", "scenario: [cells]"),
        ("rounds: 2", "rounds: '2'"),
        ("rounds: 2", "rounds: 101"),
        ("rounds: 2", "runds: 2"),
        ("order: parallel", "order: both"),
        ("agents: [warden, marco]", "agents: []"),
        ("agents: [warden, marco]", "agents: [marco, marco]"),
        ("opening: The door opens.", "opening: 12"),
        ("opening: The door opens.", "opening: {fil: x}"),
        ("never_hears: You know the code", "never_heard: x"),
        ("never_hears: You know the code", "says: x, hears: y"),
        ("ask: {marco: [First, Second]}", "ask: {marco: [1, Second]}"),
        ("name: Marco", "name: 'Marco: x'"),
        ("name: Marco", "temperature: 3"),
    ],
)
def test_schema_and_reader_reject_the_same_mistakes(old, new):
    text = SMALL.replace(old, new, 1)
    assert text != SMALL
    with pytest.raises(ScenarioError):
        read_scenario(text.encode(), "x")
    assert not VALIDATOR.is_valid(as_editors_see(text))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.sampled_from(["", "ann", "A b", "in_turn"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ann", "a"]), inner)
    ),
    max_leaves=4,
)


def places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


@settings(max_examples=150)
@given(st.data())
def test_reader_rejects_all_that_schema_rejects(data):
    """Replace one value anywhere; the reader may find more errors than the schema, never fewer."""
    whole = as_editors_see(SMALL)
    path = data.draw(st.sampled_from(list(places(whole))[1:]))
    spot = whole
    for key in path[:-1]:
        spot = spot[key]
    spot[path[-1]] = data.draw(JSON)
    if not VALIDATOR.is_valid(whole):
        with pytest.raises(ScenarioError):
            read_scenario(yaml.safe_dump(whole).encode(), "x")
