"""Expressions as grammars: the texts each part accepts, with and without its own tokens."""

import pytest

from node.grammar.expression import Json, Literal, Many, Maybe, OneOf, Pattern, Until, row
from node.grammar.lark import write_lark
from tests.support.random_walk import walker

MARKS = ("<end>", "<go>")
TAG = Until("\n</a>", ("</a>",), ("(?s:.){2,9}",))
MARKED = Until("<end>!", ("<end>", "<go>"))
CASES = [
    (Literal('a "b"\n'), ['a "b"\n'], ["a", ""]),
    (row("a", Maybe(Literal("b")), "c"), ["abc", "ac"], ["abbc"]),
    (row("a", Many(row("b", "c"))), ["a", "abcbc"], ["ab"]),
    (row(), [""], ["a"]),
    (OneOf((Literal("a"), row("b", "c"), row())), ["a", "bc", ""], ["b"]),
    (Pattern("[a-c/]{2}"), ["a/", "cc"], ["a", "ad"]),
    (Pattern("\n{1,2}"), ["\n", "\n\n"], [""]),
    (row(Json({"type": "boolean"}), "}"), ["true}"], ["true", "1}"]),
    (Json({"type": "array", "items": {"const": 1}}), ["[]", "[1, 1]"], ["[2]"]),
    (TAG, ["ab\n</a>", "a<b\n</a>"], ["a\n</a>", "ab</a>\n</a>", "ab", "ab\n</a>b\n</a>"]),
    (MARKED, ["a < end<end>!", "<end>!"], ["a", "<end>", "a<go><end>!"]),
    (row("<go>", MARKED), ["<go>a<end>!"], ["a<end>!"]),
]


def fits(expression, text, specials):
    walking = walker(*specials)
    matcher = walking.compiler.compile_expression(expression).begin()
    ids = walking.tokenizer.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("specials", [(), MARKS], ids=["plain", "marked"])
@pytest.mark.parametrize(("expression", "fitting", "others"), CASES, ids=str)
def test_expression_accepts_matching_texts_only(expression, fitting, others, specials):
    assert [text for text in fitting if not fits(expression, text, specials)] == []
    assert [text for text in others if fits(expression, text, specials)] == []


def test_special_token_cannot_be_spelled_in_letters():
    walking = walker(*MARKS)
    matcher = walking.compiler.compile_expression(Literal("<go>")).begin()
    ids = [walking.tokenizer.token_to_id(char) for char in "<go>"]
    assert matcher.try_consume_tokens(ids) == 0
    assert matcher.consume_token(walking.tokenizer.token_to_id("<go>"))


def test_repeated_part_is_written_once():
    part = Json({"type": "object"})
    assert write_lark(row(part, Many(row(", ", part))), {}).count("%json") == 1
