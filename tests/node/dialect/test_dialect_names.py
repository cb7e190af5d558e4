"""The names that settings are checked against are those of a node's formats."""

from fabric.dialect_names import CALL_NAMES, PARSER_MODES, THOUGHT_NAMES
from node.dialect.families import AUTO, HARMONY, NONE
from node.dialect.formats import CALL_ALIASES, CALL_FORMATS, THOUGHT_FORMATS


def test_names_are_those_of_the_formats():
    assert {*CALL_FORMATS, *CALL_ALIASES} == CALL_NAMES
    assert set(THOUGHT_FORMATS) == THOUGHT_NAMES
    assert {AUTO, HARMONY, NONE} == PARSER_MODES
