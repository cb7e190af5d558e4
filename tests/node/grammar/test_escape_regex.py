"""Escaped expressions accept exactly the escaped texts."""

import json
import random
import re

import pytest

from node.grammar.compiler import _compile_grammar
from node.grammar.lark import lark_grammar
from node.grammar.regexes import TextEscaping, escape_regex, json_escaping
from tests.support.random_walk import walker

JSON = json_escaping('nrbtf\\"u')
EXPRESSIONS = (
    *('a"b', r"[^x]{1,9}", ".{0,9}", r"(?s:.){0,9}", r"[0-9]{2,3}\.", r'["\\]{3}', r"\n|\t"),
    *(r"(?i:ab)\s", r"\x22\u005c", r'(a|"){1,3}', r'[\]\["]{2}', r"\S{1,5}", r"\"\/\\"),
)
HOSTILE = ('"', "\\", "\\n", "\n", "<", "</", "\\t", '\\"')


def compiled(regex):
    from llguidance import regex_to_lark

    grammar = lark_grammar(f"start: /{regex_to_lark(regex)}/")
    return _compile_grammar(walker().compiler.vocabulary(), grammar)


def walks(regex, count=40):
    grammar = compiled(regex)
    generated = (walker().walk(grammar, random.Random(seed), HOSTILE) for seed in range(count))
    return [text for text in generated if text is not None]


def read(texts):
    return [json.loads(f'"{text}"') for text in texts]


@pytest.mark.parametrize("regex", EXPRESSIONS)
def test_escaped_texts_decode_to_matches_of_the_regex(regex):
    texts = read(walks(escape_regex(regex, JSON)))
    assert texts
    assert [text for text in texts if not re.fullmatch(regex, text)] == []


def test_special_characters_can_be_escaped():
    for regex, wanted in (("[^x]", '"\\\n'), ("(?s:.)", '"\\\n'), (".", '"\\'), (r"\s", "\n\r")):
        grammar = compiled(escape_regex(regex, JSON))
        for char in f"{wanted}\t":
            assert walker().accepts(grammar, json.dumps(char)[1:-1])
            assert not walker().accepts(grammar, char) or char not in JSON.special


def test_forbidden_characters_are_excluded():
    raw = TextEscaping(forbidden="<\n")
    for regex in ("[^x]{4}", ".{4}", "(?s:.){4}", r"\W{4}"):
        texts = walks(escape_regex(regex, raw))
        assert texts
        assert not [text for text in texts if set(text) & {"<", "\n"}]
    for regex in ("a<", r"a\x{3c}", r"a\n", "a[<]"):
        with pytest.raises(ValueError, match="cannot express"):
            escape_regex(regex, raw)


@pytest.mark.parametrize(
    "regex", ["(?=a)b", "^a", "a$", r"a\b", "[a", "[a[b]]", "[a&&b]", "(?<n>a)", "a\\"]
)
def test_unsupported_syntax_is_refused(regex):
    with pytest.raises(ValueError, match="not supported"):
        escape_regex(regex, JSON)
