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
    """Check whether the text can be written token by token, and the answer ended after it."""
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
def test_format_accepts_matching_texts_only(compiler, tokenizer, output, fitting, others):
    assert [text for text in fitting if not fits(compiler, tokenizer, output, text)] == []
    assert [text for text in others if fits(compiler, tokenizer, output, text)] == []


def test_text_is_free_up_to_a_trigger(compiler, tokenizer):
    tag = {"trigger": "[go", "begin": "[go]", "schema": {"type": "boolean"}, "end": "[/go]"}
    output = OutputFormat(OutputKind.TAGS, json.dumps([tag]))
    for text in ("the cat", "the cat [go]true[/go]", "[go]false[/go] sat [go]true[/go]"):
        assert fits(compiler, tokenizer, output, text)
    assert not fits(compiler, tokenizer, output, "the cat [go]1[/go]")


def test_first_mask_has_the_models_width_and_no_end_token(compiler, tokenizer):
    grammar = compiler.compile(schema(PLACE))
    assert len(grammar.first_mask) * 32 >= tokenizer.vocabulary_size + 37
    assert not (grammar.first_mask & grammar.vocabulary.ends_mask).any()
    (brace,) = tokenizer.encode("{").ids
    assert (grammar.first_mask & bit(brace, len(grammar.first_mask))).any()


def test_complete_answer_may_end_with_any_end_token(compiler, tokenizer):
    grammar = compiler.compile(choice("a"))
    matcher = grammar.begin()
    matcher.consume_tokens(tokenizer.encode("a").ids)
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    assert (mask == grammar.vocabulary.ends_mask).all()


def test_matchers_of_one_grammar_are_independent(compiler, tokenizer):
    grammar = compiler.compile(regex("[a-c]{3}"))
    one, other = grammar.begin(), grammar.begin()
    one.consume_tokens(tokenizer.encode("abc").ids)
    assert one.is_accepting()
    assert not other.is_accepting()
    assert (np.frombuffer(other.compute_bitmask(), np.uint32) == grammar.first_mask).all()


@pytest.mark.parametrize("name", HOSTILE)
def test_uncompilable_format_is_refused_with_a_reason(compiler, name):
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
def test_unenforced_keywords_are_refused_in_strict_schemas(compiler, value):
    compiler.compile(schema(value, is_strict=False))
    with pytest.raises(RejectedError):
        compiler.compile(schema(value))


def test_schema_cannot_set_compiler_options(compiler, tokenizer):
    value = {"x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}, "type": "object"}
    assert not fits(compiler, tokenizer, schema(value), "{" + " " * 40 + "}")
    with pytest.raises(RejectedError):
        compiler.compile(schema({**value, "if": {}}))


def test_object_may_have_the_documented_number_of_optional_properties(compiler, tokenizer):
    names = [f"p{number}" for number in range(SCHEMA_PROPERTIES_MAX)]
    value = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    output = schema(value, is_strict=False)
    assert fits(compiler, tokenizer, output, json.dumps({names[0]: "a", names[-1]: "b"}))


def test_self_referencing_schema_is_refused_with_a_reason(compiler):
    with pytest.raises(RejectedError, match=r"`\$ref` leads back to itself"):
        compiler.compile(schema({"$ref": "#"}, is_strict=False))


def test_unsupported_tokenizer_is_a_client_error():
    compiler = Compiler(lambda: TokenizerFacts("{}", VOCABULARY, frozenset({2}), {}))
    with pytest.raises(RejectedError, match="tokenizer is not supported"):
        compiler.compile(regex("a"))
