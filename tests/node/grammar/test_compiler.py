"""Compiled formats: their first tokens, and refusals with a reason."""

import json

import numpy as np
import pytest

from fabric.errors import RejectedError
from fabric.limits import SCHEMA_PROPERTIES_MAX
from fabric.turn.answer_constraints import OutputFormat, OutputKind
from node.grammar.compiler import Compiler, TokenizerFacts, bit
from node.mlx.loaded_model import BUNDLED
from tests.support.formats import (
    HOSTILE,
    PLACE,
    choice,
    compiler_of,
    lark,
    regex,
    schema,
    tokenizer_in,
)
from tests.support.tiny_models import VOCABULARY, write_tokenizer


@pytest.fixture(scope="module", params=["tiny", "recall", "prose"])
def tokenizer(request, tmp_path_factory):
    folder = BUNDLED / request.param
    if request.param == "tiny":
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(folder)
    return tokenizer_in(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return compiler_of(tokenizer, tokenizer.vocabulary_size + 37)


def fits(compiler, tokenizer, output, text):
    """Say whether the text can be written token by token, and the answer end behind it."""
    matcher = compiler.compile(output).begin()
    ids = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


GOOD = [
    (OutputFormat(OutputKind.JSON_OBJECT), ['{"a": 1}', "{}", '{\n  "a": [1, 2]\n}'], ["[]", "{"]),
    (schema(PLACE), ['{"name": "Po", "kind": "river", "size": 9}'], ['{"name": "Po"}', "1"]),
    (schema(True), ["1", '"a"', "[null]"], ["a"]),
    (schema({"type": "string", "minLength": 2}), ['"größer"'], ['"a"']),
    (regex("[a-c]+x?"), ["abcx", "a"], ["x", "abd"]),
    (choice("yes", 'no, "never"\n', "größer"), ["yes", 'no, "never"\n', "größer"], ["ye", "no"]),
    (lark('start: "<" INT ">"\nINT: /[0-9]+/'), ["<12>"], ["<>", "12"]),
]


@pytest.mark.parametrize(("output", "fitting", "others"), GOOD, ids=lambda x: str(x)[:30])
def test_a_format_lets_through_what_fits_and_nothing_else(
    compiler, tokenizer, output, fitting, others
):
    assert [text for text in fitting if not fits(compiler, tokenizer, output, text)] == []
    assert [text for text in others if fits(compiler, tokenizer, output, text)] == []


def test_text_is_free_up_to_a_trigger(compiler, tokenizer):
    tag = {"trigger": "[go", "begin": "[go]", "schema": {"type": "boolean"}, "end": "[/go]"}
    output = OutputFormat(OutputKind.TAGS, json.dumps([tag]))
    for text in ("the cat", "the cat [go]true[/go]", "[go]false[/go] sat [go]true[/go]"):
        assert fits(compiler, tokenizer, output, text)
    assert not fits(compiler, tokenizer, output, "the cat [go]1[/go]")


def test_the_first_mask_is_of_the_models_width_and_without_an_end(compiler, tokenizer):
    grammar = compiler.compile(schema(PLACE))
    assert len(grammar.first_mask) * 32 >= tokenizer.vocabulary_size + 37
    assert not (grammar.first_mask & grammar.vocabulary.ends_mask).any()
    (brace,) = tokenizer.encode("{").ids
    assert (grammar.first_mask & bit(brace, len(grammar.first_mask))).any()


def test_an_answer_may_end_at_every_end_token_once_it_may_end(compiler, tokenizer):
    grammar = compiler.compile(choice("a"))
    matcher = grammar.begin()
    matcher.consume_tokens(tokenizer.encode("a").ids)
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    assert (mask == grammar.vocabulary.ends_mask).all()


def test_answers_do_not_disturb_each_other(compiler, tokenizer):
    grammar = compiler.compile(regex("[a-c]{3}"))
    one, other = grammar.begin(), grammar.begin()
    one.consume_tokens(tokenizer.encode("abc").ids)
    assert one.is_accepting()
    assert not other.is_accepting()
    assert (np.frombuffer(other.compute_bitmask(), np.uint32) == grammar.first_mask).all()


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_compiled_is_refused_with_a_reason(compiler, name):
    with pytest.raises(RejectedError) as caught:
        compiler.compile(HOSTILE[name])
    error = caught.value
    assert (int(error.status), error.code, error.param) == (
        400,
        "invalid_format",
        "response_format",
    )
    assert 30 < len(error.message) < 600


LENIENT = [
    {"type": "array", "uniqueItems": True},
    {"type": "string", "format": "password"},
    {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
]


@pytest.mark.parametrize("value", LENIENT, ids=str)
def test_what_is_not_enforced_is_refused_where_the_schema_is_strict(compiler, value):
    compiler.compile(schema(value, is_strict=False))
    with pytest.raises(RejectedError):
        compiler.compile(schema(value))


def test_a_schema_does_not_set_the_compilers_options(compiler, tokenizer):
    value = {"x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}, "type": "object"}
    assert not fits(compiler, tokenizer, schema(value), "{" + " " * 40 + "}")
    with pytest.raises(RejectedError):
        compiler.compile(schema({**value, "if": {}}))


def test_an_object_may_have_as_many_optional_properties_as_documented(compiler, tokenizer):
    names = [f"p{number}" for number in range(SCHEMA_PROPERTIES_MAX)]
    value = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    output = schema(value, is_strict=False)
    assert fits(compiler, tokenizer, output, json.dumps({names[0]: "a", names[-1]: "b"}))


def test_a_schema_that_is_only_a_reference_to_itself_is_refused_in_words(compiler):
    with pytest.raises(RejectedError, match=r"`\$ref` leads back to itself"):
        compiler.compile(schema({"$ref": "#"}, is_strict=False))


def test_a_tokenizer_that_cannot_be_read_is_no_fault_of_the_node():
    compiler = Compiler(lambda: TokenizerFacts("{}", VOCABULARY, frozenset({2}), {}))
    with pytest.raises(RejectedError, match="tokenizer is not supported"):
        compiler.compile(regex("a"))
