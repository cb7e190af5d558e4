"""Arguments that end early: whole members, or the text so far."""

import json
from itertools import pairwise

import pytest

from fabric.turn.partial_json import whole_members

CASES = {
    "": ({}, {}),
    "{": ({}, {}),
    '{"input': ({}, {}),
    '{"input": "a \\"b\\" {': ({}, {"input": 'a "b" {'}),
    '{"input": "a\\': ({}, {"input": "a"}),
    '{"input": "a\\\\': ({}, {"input": "a\\"}),
    '{"input": "a\\u00e': ({}, {"input": "a"}),
    '{"input": "\\ud83d\\ude0': ({}, {"input": ""}),
    '{"a": 1, "input": "x, y': ({"a": 1}, {"a": 1, "input": "x, y"}),
    '{"a": 12': ({}, {}),
    '{"a": true': ({"a": True}, {"a": True}),
    '{"a": [1, {"b": "c"}, {"d": "e': ({"a": [1, {"b": "c"}, {}]}, None),
    '{"a": "b"}': ({"a": "b"}, {"a": "b"}),
    '{"a": }': ({}, {}),
    "[1, 2": ({}, {}),
    "no object": ({}, {}),
    '{"a": ' * 200: ({}, {}),
}


@pytest.mark.parametrize("text", CASES, ids=lambda text: text[:40])
def test_complete_members_are_read(text):
    whole, so_far = CASES[text]
    assert whole_members(text) == whole
    assert so_far is None or whole_members(text, cuts_text=True) == so_far


def test_every_prefix_of_an_object_gives_an_object():
    text = json.dumps({"a": ['x "y"\n', {"b": None}], "größe": "\U0001f600 東", "n": 17}) + "}"
    seen = [whole_members(text[:end]) for end in range(len(text))]
    assert seen[-1]["n"] == 17
    assert all(list(a) == list(b)[: len(a)] for a, b in pairwise(seen))
