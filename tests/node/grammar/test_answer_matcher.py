"""Matching one answer against its grammar, after a thought, and from a saved state."""

from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

from fabric.errors import RejectedError
from fabric.turn.answer_constraints import OutputFormat
from node.grammar import answer_matcher
from node.grammar.answer_matcher import AnswerMatcher, CallRule
from node.grammar.expression import Pattern, row
from node.grammar.thought import Beginning, ThoughtMarks
from tests.support.formats import TOO_COMPLEX, choice, compiler_of, regex, schema, tokenizer_in
from tests.support.tiny_models import VOCABULARY, write_tokenizer

END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return tokenizer_in(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return compiler_of(tokenizer, VOCABULARY)


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def begin(compiler, tokenizer, threads):
    def begin(output: OutputFormat, beginning=Beginning.TEXT, call_ids=None, marks=None):
        grammar, marks = compiler.compile(output), marks or tokenizer.thought_marks
        rule = None if call_ids is None else CallRule(frozenset(call_ids))
        return AnswerMatcher(grammar, threads, marks, beginning, rule)

    return begin


def allowed(matcher):
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCABULARY]))


def test_tokens_of_the_format_are_allowed_and_its_end_at_the_end(begin, tokenizer):
    matcher = begin(choice("the dog", "the cat"))
    for token in tokenizer.encode("the cat").ids:
        assert token in allowed(matcher)
        assert END not in allowed(matcher)
        matcher.take(token)
    assert allowed(matcher) == {END}
    matcher.take(END)
    assert allowed(matcher) == {END}, "the extra step after the end"
    matcher.take(END)
    assert allowed(matcher) == {END}


def test_thought_is_unconstrained_but_has_no_end_token(begin, tokenizer):
    matcher = begin(regex("[a-z]+"), Beginning.THOUGHT)
    for token in tokenizer.encode("{1} <tool_call> {").ids:
        assert allowed(matcher) == set(range(VOCABULARY)) - {END}
        matcher.take(token)
    (close,) = tokenizer.encode("</think>").ids
    matcher.take(close)
    assert allowed(matcher) == allowed(begin(regex("[a-z]+")))


def test_optional_thought_may_precede_the_format(begin, tokenizer):
    (start,), (letter, *_) = tokenizer.encode("<think>").ids, tokenizer.encode("a").ids
    matcher = begin(regex("[a-z]+"), Beginning.EITHER)
    assert matcher.openings == (start,)
    assert allowed(matcher) == allowed(begin(regex("[a-z]+")))
    matcher.take(start)
    matcher.mask()
    assert matcher.openings == ()
    assert END not in allowed(matcher)
    assert start in allowed(matcher), "a thought is unconstrained"

    other = begin(regex("[a-z]+"), Beginning.EITHER)
    other.take(letter)
    assert END in allowed(other)
    assert start not in allowed(other)
    assert begin(regex("[a-z]+")).openings == ()


@pytest.mark.parametrize("thought", ["", "<think>the cat</think>"])
def test_call_replaces_the_format_or_is_disallowed(begin, tokenizer, thought):
    (call,), letters = tokenizer.encode("<tool_call>").ids, tokenizer.encode("the cat").ids
    beginning = Beginning.EITHER if thought else Beginning.TEXT
    free, bound = (begin(regex("[a-z ]+"), beginning, [call]) for _ in range(2))
    for matcher in (free, bound):
        matcher.replay(tokenizer.encode(thought).ids)
        assert call in matcher.openings
        assert call not in allowed(matcher)
    free.take(call)
    assert allowed(free) == set(range(VOCABULARY)), "unconstrained, its end included"
    free.take(END)
    assert allowed(free) == {END}
    for token in letters:
        bound.take(token)
        assert call not in allowed(bound)
        assert bound.openings == ()


def test_line_ends_are_allowed_after_a_thought(begin, tokenizer):
    """Thinking models write two line ends; without this rule they could not call a tool."""
    (call,), (line_end,) = (tokenizer.encode(text).ids for text in ("<tool_call>", "\n"))
    thought, (letter, *_) = tokenizer.encode("the cat</think>").ids, tokenizer.encode("a").ids
    called, formed = (begin(regex("[a-z]+"), Beginning.THOUGHT, [call]) for _ in range(2))
    for matcher in (called, formed):
        matcher.replay(thought)
        for _ in range(2):
            assert line_end not in allowed(matcher)
            assert line_end in matcher.openings
            matcher.take(line_end)
        matcher.mask()
        assert matcher.openings == (call,)
    called.take(call)
    assert allowed(called) == set(range(VOCABULARY))
    formed.take(letter)
    assert END in allowed(formed)
    assert formed.openings == ()

    with pytest.raises(RejectedError):
        begin(regex("[a-z]+"), Beginning.THOUGHT).replay([*thought, *[line_end] * 3])
    assert line_end not in begin(regex("[a-z]+"), Beginning.TEXT).openings


def test_leading_line_ends_of_the_format_belong_to_the_format(begin, tokenizer):
    (line_end,) = tokenizer.encode("\n").ids
    matcher = begin(regex("\n\n[a-z]"), Beginning.THOUGHT)
    matcher.replay([*tokenizer.encode("</think>").ids, line_end, line_end])
    assert line_end not in allowed(matcher)
    assert allowed(matcher) == allowed(begin(regex("[a-z]")))


def test_call_is_allowed_within_a_thought(begin, tokenizer):
    (call,) = tokenizer.encode("<tool_call>").ids
    matcher = begin(regex("[a-z ]+"), Beginning.THOUGHT, [call])
    matcher.replay(tokenizer.encode("the cat").ids)
    assert END not in allowed(matcher)
    matcher.take(call)
    assert END in allowed(matcher)


def test_call_quoted_in_a_thought_does_not_lift_the_format(begin, tokenizer):
    (call,) = tokenizer.encode("<tool_call>").ids
    matcher = begin(choice("the cat"), Beginning.THOUGHT, [call])
    matcher.replay([call, *tokenizer.encode("the {cat}").ids])
    assert allowed(matcher) == set(range(VOCABULARY))
    matcher.replay(tokenizer.encode("</think>").ids)
    assert allowed(matcher) == allowed(begin(choice("the cat"), call_ids=[call]))


@pytest.mark.parametrize("beginning", [Beginning.THOUGHT, Beginning.EITHER])
def test_constrained_calls_are_barred_in_a_thought_before_a_free_answer(
    compiler, tokenizer, threads, beginning
):
    (call,) = tokenizer.encode("<tool_call>").ids
    calls = compiler.compile_expression(row("<tool_call>", Pattern("[0-9]")))
    rule, barred = CallRule(frozenset([call]), calls), frozenset([call])
    marks = tokenizer.thought_marks
    matcher = AnswerMatcher(None, threads, marks, beginning, rule, barred)
    if beginning is Beginning.EITHER:
        assert allowed(matcher) == set(range(VOCABULARY))
        matcher.replay(tokenizer.encode("<think>").ids)
    matcher.replay(tokenizer.encode("the cat").ids)
    assert allowed(matcher) == set(range(VOCABULARY)) - {call}
    matcher.replay(tokenizer.encode("</think>").ids)
    assert allowed(matcher) == set(range(VOCABULARY))
    matcher.replay([*tokenizer.encode("the ").ids, call])
    assert allowed(matcher) == set(tokenizer.encode("0123456789").ids)


def test_answer_may_end_after_a_call_message_in_the_thought(begin, tokenizer):
    marks = ThoughtMarks("", ("cat", "sat"), is_always=True, holds_calls=True)
    assert END in allowed(begin(choice("a"), Beginning.THOUGHT, [], marks))
    bound = begin(choice("a"), Beginning.THOUGHT, None, marks)
    assert END not in allowed(bound)
    bound.replay(tokenizer.encode("the cat sat").ids)
    assert allowed(bound) == allowed(begin(choice("a")))


@pytest.mark.parametrize("beginning", Beginning)
@pytest.mark.parametrize("count", range(0, 16, 3))
def test_replayed_matcher_equals_an_uninterrupted_one(begin, tokenizer, beginning, count):
    thoughts = {Beginning.THOUGHT: "the cat</think>", Beginning.EITHER: "<think>a</think>"}
    text = thoughts.get(beginning, "") + '{"größe": "the cat"}'
    output = schema({"properties": {"größe": {"type": "string"}}, "type": "object"})
    ids = [*tokenizer.encode(text).ids, END]
    whole, resumed = begin(output, beginning), begin(output, beginning)
    for token in ids[:count]:
        whole.take(token)
        whole.mask()
    resumed.replay(ids[:count])
    for token in ids[count:]:
        assert allowed(resumed) == allowed(whole)
        whole.take(token)
        resumed.take(token)
    assert allowed(resumed) == allowed(whole) == {END}


def test_tokens_outside_the_format_are_refused(begin):
    matcher = begin(choice("the cat"))
    with pytest.raises(RejectedError):
        matcher.replay([100, 200, 300])


def test_format_growing_too_complex_fails_permanently(begin, tokenizer):
    matcher = begin(TOO_COMPLEX)
    ids = tokenizer.encode("bcdbcdbca").ids

    def follow():
        for token in ids:
            matcher.take(token)
            matcher.mask()

    with pytest.raises(RejectedError) as caught:
        follow()
    assert "bcd" not in caught.value.message
    with pytest.raises(RejectedError):
        matcher.mask()


def test_mask_timeout_fails_only_this_answer(begin):
    matcher = begin(choice("the cat"))
    matcher._next_mask = Future()
    with (
        mock.patch.object(answer_matcher, "GRAMMAR_MASK_S", 0.01),
        pytest.raises(RejectedError, match="took more than") as caught,
    ):
        matcher.mask()
    assert caught.value.code == "format_too_complex"


def test_free_answer_follows_the_call_grammar_once_a_call_starts(
    begin, compiler, tokenizer, threads
):
    (call,) = tokenizer.encode("<tool_call>").ids
    calls = compiler.compile_expression(row("<tool_call>", Pattern("[0-9]{2}")))
    matcher = AnswerMatcher(None, threads, calls=CallRule(frozenset([call]), calls))
    assert matcher.openings == ()
    for token in tokenizer.encode("the {cat} <think>").ids:
        assert allowed(matcher) == set(range(VOCABULARY)), "unconstrained, its end included"
        matcher.take(token)
    matcher.take(call)
    digits = set(tokenizer.encode("0123456789").ids)
    assert allowed(matcher) <= digits | {END} - {END}
    for token in tokenizer.encode("42").ids:
        assert token in allowed(matcher)
        matcher.take(token)
    assert allowed(matcher) == {END}
    with pytest.raises(RejectedError):
        matcher.replay(tokenizer.encode("the").ids)


def test_call_with_a_grammar_replaces_the_format(compiler, tokenizer, threads):
    (call,) = tokenizer.encode("<tool_call>").ids
    calls = compiler.compile_expression(row("<tool_call>", Pattern("[0-9]")))
    rule = CallRule(frozenset([call]), calls)
    matcher = AnswerMatcher(compiler.compile(choice("the cat")), threads, calls=rule)
    assert call in matcher.openings
    matcher.take(call)
    assert allowed(matcher) == set(tokenizer.encode("0123456789").ids)
    assert matcher.openings == ()


def test_barred_tokens_are_disallowed_in_a_thought(compiler, tokenizer, threads):
    (call,), (close,) = (tokenizer.encode(t).ids for t in ("<tool_call>", "</think>"))
    grammar = compiler.compile_expression(row("<tool_call>", Pattern("[0-9]")))
    marks = tokenizer.thought_marks
    barred = frozenset([call])
    matcher = AnswerMatcher(grammar, threads, marks, Beginning.THOUGHT, barred_ids=barred)
    assert allowed(matcher) == set(range(VOCABULARY)) - {END, call}
    matcher.take(close)
    assert allowed(matcher) == {call}
