"""Regular expressions that accept texts without a given word."""

import random
import re

import pytest

from node.grammar.expression import Until
from node.grammar.regexes import exclude_word
from node.limits import CALL_TEXT_COUNTED_CHARS_MAX
from tests.support.random_walk import walker

# Each word, and the part of it that no accepted text contains.
WORDS = {
    "</parameter>": "</parameter>",
    "]]>": "]>",
    '<|"|>': '<|"|>',
    "<|close|>argument<|sep|>": "<|close|>argument",
    "ab": "ab",
    "abab": "ab",
    "<": "<",
    "\n": "\n",
    "^-]": "^-]",
}


@pytest.mark.parametrize("word", WORDS)
def test_regex_accepts_only_texts_without_the_word(word):
    pattern, part, rng = re.compile(exclude_word(word)), WORDS[word], random.Random(word)
    pieces = [*word, *(part[:size] for size in range(1, len(part))), part, "x", " ", "\n", "é"]
    seen = set()
    for _ in range(5_000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(9)))
        fits = pattern.fullmatch(text) is not None
        assert fits == (part not in text), text
        seen.add(fits)
    assert seen == {True, False}


@pytest.mark.parametrize("most", [100, CALL_TEXT_COUNTED_CHARS_MAX])
def test_bounded_text_ends_before_its_tag(most):
    """A compiler that negates gives up at sixty characters."""
    edges = "([^\n]((?s:.)*[^\n])?)?"
    walking = walker()
    until = Until("\n</parameter>", ("</parameter>",), (f"(?s:.){{0,{most}}}", edges))
    matcher = walking.compiler.compile_expression(until).begin()
    text = "</div> < </parameter" * (most // 20)
    ids = walking.tokenizer.encode(f"{text}\n</parameter>").ids
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()

    matcher.reset()
    ids = walking.tokenizer.encode(f"{text}{text}x").ids
    assert matcher.try_consume_tokens(ids) < len(ids)
