"""Families are detected by distinct signs, and their names are valid settings."""

from itertools import permutations

import pytest

from fabric.settings import CALL_NAMES, PARSER_MODES, THOUGHT_NAMES
from node.dialect.format_selection import (
    AUTO,
    CALL_ALIASES,
    CALL_FORMATS,
    FAMILIES,
    MESSAGE_FORMATS,
    NONE,
    THOUGHT_FORMATS,
)
from node.dialect.formats import Rank
from tests.node.dialect.reading import marked


def test_settings_list_the_names_of_all_formats():
    assert {*CALL_FORMATS, *CALL_ALIASES} == CALL_NAMES
    assert set(THOUGHT_FORMATS) == THOUGHT_NAMES
    assert {AUTO, NONE, *MESSAGE_FORMATS} == PARSER_MODES


DSML = "{% set dsml_token = '｜DSML｜' %}{{ '<' + dsml_token + 'SECTION>' }}"


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ("function_calls", "deepseek_v32"),
        ("tool_calls", "deepseek_v4"),
        (" calls", "deepseek_v41"),
    ],
)
def test_versions_of_a_format_are_distinguished_by_their_sections(section, name):
    assert marked(template=DSML.replace("SECTION", section)).calls.name == name


def test_distinguishing_marks_belong_to_one_family_only():
    for family, other in permutations(FAMILIES, 2):
        written = [mark for calls in other.calls for mark in (*calls.starts, calls.end)]
        written += [mark for thought in other.thoughts for mark in (thought.start, thought.end)]
        for format_ in (*family.calls, *family.thoughts):
            own = [sign for sign in format_.signs if sign.rank is Rank.OWN]
            assert not [s for s in own if all(text in " ".join(written) for text in s.texts)]
