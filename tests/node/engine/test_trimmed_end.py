"""The end of an answer's text before trailing white space, found token by token."""

import pytest

from node.engine.sequence import TrimmedEnd
from node.mlx.resident_cache import CacheMark


def end_of(*texts, always=True, has_calls=False, behind=0):
    end = TrimmedEnd(always, behind)
    for at, text in enumerate(texts):
        end.follow(text, CacheMark(100 + at, ()))
    mark = end.mark(has_calls=has_calls)
    return None if mark is None else mark.tokens_count - 100


@pytest.mark.parametrize(
    ("texts", "at"),
    [
        (("It", " is."), None),
        (("It", " is.", "\n"), 2),
        (("It", " is.", "\n", " ", "\n\n"), 2),
        (("It", "\n", " is."), None),
        (("It", "\n", " is", "\n"), 3),
        (("It", " is.\n"), 1),  # the text ends within it
        (("It", "\n", " is.\n", "\n"), 2),
        (("It", " is.", "", "\n"), 2),  # some tokenizers drop a lone blank
        (("It", "\n", "\N{REPLACEMENT CHARACTER}"), None),  # half of a character
        (("\n",), 0),
    ],
)
def test_trimmed_end_precedes_trailing_white_space(texts, at):
    assert end_of(*texts) == at


def test_without_trimming_templates_only_calls_get_a_trimmed_end():
    """Every template writes the end of a call in its own way."""
    assert end_of("x", "\n", always=False) is None
    assert end_of("x", "\n", always=False, has_calls=True) == 1


def test_trimmed_end_close_to_another_is_dropped():
    assert end_of("x", "\n", behind=101) is None
    assert end_of("x", "\n", behind=100) == 1
