"""Answers with budgets of thought in the batch of a real tiny engine."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, repeat

import jsonschema
import pytest

from fabric.turn.generation import FinishReason, Priority, Resumption, Sampling
from node.engine.sequence import Ended, Produced, Started
from node.grammar.answer_matcher import AnswerMatcher, CallRule
from node.grammar.thought import Beginning
from node.mlx.answer import Answer
from node.mlx.thought_budget import ThoughtBudget, ThoughtEndings
from tests.node.engine_bench import Bench, at_token, drain_events, prompt_of, wait
from tests.support.formats import PLACE, compiler_of, schema
from tests.support.tiny_models import ONE_LAYER, TOKENS, write_model

OPENED = "<|im_start|>assistant\n<think>\n"
END = "\n</think>\n\n"
LONG = 48
# Marks are never sampled, so that only the budgets end a thought.
NO_MARKS = {"3": -100.0, "4": -100.0, "2": -100.0, "0": -100.0, "1": -100.0, "5": -100.0}
SAMPLINGS = [
    Sampling(max_tokens=LONG, ignore_eos=True, logit_bias=NO_MARKS),
    Sampling(max_tokens=LONG, ignore_eos=True, logit_bias=NO_MARKS, temperature=1.0, seed=4),
    Sampling(
        max_tokens=LONG,
        ignore_eos=True,
        logit_bias=NO_MARKS,
        temperature=0.8,
        seed=5,
        top_p=0.9,
        logprobs=2,
        repetition_penalty=1.2,
    ),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model") / "model", ONE_LAYER)
    bench = Bench(folder, exact_chunks=True, active_max=12)
    yield bench
    bench.thread.stop()


@pytest.fixture(scope="module")
def endings(bench):
    return ThoughtEndings(bench.tokenizer)


@pytest.fixture(scope="module")
def end_ids(endings):
    return list(endings.close("thought"))


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def make(bench, endings):
    """Return a function that makes sequences with a budget, or with none."""

    def make(number, sampling, tokens, **hooks):
        tokenizer, budget = bench.tokenizer, None
        if tokens is not None:
            answer = Answer(tokenizer, "<think>\n", (), None)
            budget = ThoughtBudget(answer, "<think>\n", endings, tokens)
        prompt = [*prompt_of(30 + number, number), *tokenizer.encode(OPENED).ids]
        sequence, events = bench.make(prompt, sampling, budget=budget, **hooks)
        sequence.answer = Answer(tokenizer, "<think>\n", (), None)
        return sequence, events

    return make


def run(bench, sequences):
    for sequence, _ in sequences:
        bench.thread.submit(sequence)
    return [drain_events(events).answer_ids for _, events in sequences]


def length_of(ids, end_ids):
    """Return the thought's tokens before its end."""
    return next((at for at in range(len(ids)) if ids[at : at + len(end_ids)] == end_ids), None)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded", "penalized"])
def test_budget_ends_the_thought_and_changes_nothing_before(bench, make, end_ids, sampling):
    (free,) = run(bench, [make(0, sampling, None)])
    assert 4 not in free
    for tokens in (0, 1, 7, LONG - 4, LONG, LONG + 9):
        (got,) = run(bench, [make(0, sampling, tokens)])
        cut = length_of([*got, *end_ids], end_ids)
        assert got[:cut] == free[:cut]
        assert len(got) == LONG
        if tokens + len(end_ids) <= LONG:  # a cut character takes up to three tokens more
            assert tokens <= cut <= tokens + 3
            assert bench.tokenizer.decode(got[: cut + len(end_ids)]).endswith(END)
        if tokens >= LONG:
            assert got == free


@pytest.mark.usefixtures("order")
def test_batch_of_mixed_budgets_equals_each_alone(bench, make):
    cases = [
        (number, SAMPLINGS[number % len(SAMPLINGS)], tokens)
        for number, tokens in enumerate([None, 0, 1, 6, 20, None, 3, 200])
    ]
    alone = [run(bench, [make(*case)])[0] for case in cases]
    assert run(bench, [make(*case) for case in cases]) == alone


def test_forced_end_leaves_the_same_cache_as_a_sampled_one(bench, make):
    """Forced tokens are fed as sampled ones: the same text without a budget has the same bytes."""
    sampling = SAMPLINGS[1]
    budgeted, events = make(1, sampling, 5)
    bench.thread.submit(budgeted)
    got = drain_events(events)
    unbudgeted, events = make(1, sampling, None)
    tokens = chain(got.answer_ids, repeat(0))  # one more is sampled after the last
    emit = unbudgeted.emit

    def follow(event):
        if isinstance(event, Started):
            unbudgeted.slot.sampler = ForcedSampler(unbudgeted.slot.sampler, tokens)
        emit(event)

    unbudgeted.emit = follow
    bench.thread.submit(unbudgeted)
    again = drain_events(events)
    assert again.answer_ids == got.answer_ids
    assert (again.answer_text, again.answer_ends) == (got.answer_text, got.answer_ends)
    assert bench.bytes_of(unbudgeted.cache) == bench.bytes_of(budgeted.cache)


class ForcedSampler:
    """A sampler that computes as usual, then returns the given tokens."""

    is_plain_greedy = False

    def __init__(self, sampler, tokens):
        self._sampler, self._tokens = sampler, tokens

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def sample(self, logits, allowed=None, openings=()):
        return self._sampler.force(logits, next(self._tokens))


def test_forced_tokens_report_the_models_own_probabilities(bench, make, end_ids):
    sampling = replace(SAMPLINGS[0], logprobs=3)
    sequence, events = make(2, sampling, 4)
    seen = []
    emit = sequence.emit
    sequence.emit = lambda event: (seen.append(event), emit(event))
    (ids,) = run(bench, [(sequence, events)])
    cut = length_of(ids, end_ids)
    produced = [event for event in seen if isinstance(event, Produced)]
    assert len(produced) == len(ids)
    forced = produced[cut].logprobs[0]
    likeliest = max(forced.alternatives, key=lambda each: each[1])
    assert forced.token == bench.tokenizer.token_text(ids[cut])
    assert forced.logprob < likeliest[1]  # the model would have continued the thought
    for event in (*produced[:cut], *produced[cut + len(end_ids) + 1 :]):
        assert event.logprobs[0].logprob == event.logprobs[0].alternatives[0][1]


def test_paused_thought_keeps_its_token_count(bench, make):
    sampling = SAMPLINGS[1]
    whole = run(bench, [make(3, sampling, 8)])[0]
    for at in (3, 8, 9, 10):
        paused, events = make(3, sampling, 8, priority=Priority.BACKGROUND)
        urgent = [make(9 + n, replace(SAMPLINGS[0], max_tokens=6), None) for n in range(12)]
        at_token(paused, at, lambda urgent=urgent: [bench.thread.submit(s) for s, _ in urgent])
        assert run(bench, [(paused, events)])[0] == whole
        for _, others in urgent:
            drain_events(others)


@pytest.mark.parametrize("at", range(2, 14))
def test_handed_over_thought_resumes_in_another_sequence(bench, make, endings, at):
    sampling, tokens = SAMPLINGS[2], 6
    (whole,) = run(bench, [make(4, sampling, tokens)])
    first, events = make(4, sampling, tokens)
    at_token(first, at, first.yielding.set)
    bench.thread.submit(first)
    left = wait(events)
    assert isinstance(left, Ended)
    assert left.is_handover
    resume = Resumption(
        tuple(left.answer_ids), left.sampled.token, left.sampled.top, first.input.seed
    )
    budget = ThoughtBudget(
        Answer(bench.tokenizer, "<think>\n", (), None), "<think>\n", endings, tokens
    )
    for token in resume.answer_ids:
        budget.take(token)
    prompt = [*first.input.prompt, *resume.answer_ids, resume.sampled]
    second, events = bench.make(
        prompt, sampling, budget=budget, resumed=resume, answer_ids=list(resume.answer_ids)
    )
    assert run(bench, [(second, events)])[0] == whole


def thinking_matcher(bench, threads, grammar=None, calls=None):
    marks = bench.tokenizer.thought_marks
    return AnswerMatcher(grammar, threads, marks, Beginning.THOUGHT, calls)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_format_starts_after_a_forced_thought_end(
    bench, make, threads, end_ids, tokens, temperature
):
    compiler = compiler_of(bench.tokenizer, TOKENS)
    matcher = thinking_matcher(bench, threads, compiler.compile(schema(PLACE)))
    sampling = Sampling(max_tokens=300, temperature=temperature, seed=7)
    sampling = replace(sampling, logit_bias={"4": -100.0, "3": -100.0})
    sequence, events = make(5, sampling, tokens, matcher=matcher)
    bench.thread.submit(sequence)
    got = drain_events(events)
    assert got.reason is FinishReason.STOP
    cut = length_of(got.answer_ids, end_ids)
    assert tokens <= cut <= tokens + 3
    answer = got.answer_text.partition(END)[2].removesuffix("<|im_end|>")
    jsonschema.validate(json.loads(answer), PLACE)


def test_format_takes_precedence_over_budget(bench, make, threads):
    """A format of the whole answer allows no thought end, so none is forced."""
    compiler = compiler_of(bench.tokenizer, TOKENS)
    grammar = compiler.compile(schema(PLACE))
    matcher = AnswerMatcher(grammar, threads)
    sequence, events = make(
        6, Sampling(max_tokens=300, temperature=1.0, seed=3), 2, matcher=matcher
    )
    bench.thread.submit(sequence)
    got = drain_events(events)
    jsonschema.validate(json.loads(got.answer_text.removesuffix("<|im_end|>")), PLACE)


def test_calls_may_follow_a_forced_thought_end(bench, make, threads, end_ids):
    """If calls are unconstrained until one starts, the thought's end is too."""
    compiler = compiler_of(bench.tokenizer, TOKENS)
    call = bench.tokenizer.added_ids["<tool_call>"]
    grammar = compiler.compile(schema(PLACE))
    matcher = thinking_matcher(bench, threads, calls=CallRule(frozenset({call}), grammar))
    (ids,) = run(bench, [make(7, SAMPLINGS[1], 3, matcher=matcher)])
    assert 3 <= length_of(ids, end_ids) <= 6


def test_ended_thought_is_not_reopened(bench, make, end_ids):
    """The likeliest token would reopen the thought every time."""
    start = bench.tokenizer.added_ids["<think>"]
    sampling = replace(SAMPLINGS[0], logit_bias={**NO_MARKS, str(start): 100.0})
    (ids,) = run(bench, [make(8, sampling, 0)])
    rest = ids[len(end_ids) :]
    assert ids[: len(end_ids)] == end_ids
    assert rest[0] != start
    assert start in rest  # later, the mark is text
