"""Answers in a record's bytes, as encoded by this version and later ones."""

import json

import pytest

from fabric.limits import ANSWERS_BYTES_MAX
from fabric.record.answers import CallWritten, OmittedParts, decode_answers, encode_answers

CALL = CallWritten('{"a":1}', "call_1")
ANSWERS = {1: OmittedParts("Hm, größer.", "\n\n", " ", (CALL,)), 2**64 - 1: OmittedParts("So.")}
# As written by the first version with answers.
SPELLED = (
    '[["0000000000000001","Hm, größer.","\\n\\n"," ",[["{\\"a\\":1}","call_1"]]],'
    '["ffffffffffffffff","So.","","",[]]]'
)


def test_answers_keep_their_encoding_and_round_trip():
    assert encode_answers(ANSWERS) == SPELLED
    assert decode_answers(SPELLED) == ANSWERS
    assert encode_answers({}) == ""
    assert decode_answers("") == {}


def test_signs_are_appended_only_where_present():
    answers = {1: OmittedParts("Hm.", signs=(5, 2**64 - 1)), 2: OmittedParts("So.")}
    spelled = encode_answers(answers)
    assert json.loads(spelled)[0][5:] == [f"{5:016x}ffffffffffffffff"]
    assert json.loads(spelled)[1][5:] == []
    assert decode_answers(spelled) == answers
    for other in ("more", "g" * 16, 5, "f" * 16 * 99):
        rows = json.loads(spelled)
        rows[0][5] = other
        assert decode_answers(json.dumps(rows))[1].signs == ()


def test_fields_appended_by_later_versions_are_ignored():
    rows = [[*row, "more"] for row in json.loads(SPELLED)]
    rows[0][4][0].append("more")
    assert decode_answers(json.dumps(rows)) == ANSWERS


@pytest.mark.parametrize(
    "text",
    [
        *("[", "{}x", "5", "null", '["x"]', '[["x","","","",[]]]', '[["1"]]', '[["1","","","",5]]'),
        *('[["1",5,"","",[]]]', '[["1","","","",[["a"]]]]', '[["1","","","",[["a",null]]]]'),
        *("[" * 100_000, '[["' + "f" * 5_000 + '","","","",[]]', SPELLED[:-1]),
        '[["1","' + "x" * 9 * ANSWERS_BYTES_MAX + '","","",[]]]',
    ],
    ids=range(15),
)
def test_unparsable_answers_decode_to_none(text):
    assert decode_answers(text) == {}
