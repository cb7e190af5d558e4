"""Placeholders are filled once, in the author's text only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import TooLargeError
from router.scenario.template import parse_template, render


def filled(text, value):
    return render(parse_template(text), lambda _: iter([value]))


def test_placeholders_are_filled_once():
    assert filled("a ${x} b ${p.messages[q]}", "${x}") == "a ${x} b ${x}"
    assert filled("costs $${x} and $5 and {y}", "!") == "costs ${x} and $5 and {y}"
    assert filled("ends ${x}\n\n", " ") == "ends"


@given(st.text())
def test_filled_values_are_not_expanded(value):
    assert filled("<${x}>", value) == f"<{value}>"


def test_filled_text_is_bounded():
    with pytest.raises(TooLargeError, match="grows beyond"):
        filled("${x}" * 100, "y" * 100_000)
