"""Answers of prescribed formats in a batch where others are free."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from fabric.errors import RejectedError
from fabric.turn.generation import FinishReason, Sampling
from node.engine.sequence import Broke, Ended, Produced
from node.grammar.answer_matcher import AnswerMatcher
from node.mlx.sampling import LOGPROB_MIN
from tests.node.engine_bench import Bench, drain_events, prompt_of, wait
from tests.support.formats import TOO_COMPLEX, compiler_of, random_schema, regex, schema
from tests.support.samples import sample
from tests.support.tiny_models import ONE_LAYER, TOKENS, write_model

SEEDS, SEEDS_NIGHTLY = 54, 200
BATCH = 20
LONG = 60
STEADY = regex(f"[a-z ]{{{100 * LONG}}}")  # outlasts all other answers


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(
        write_model(tmp_path_factory.mktemp("model") / "model", ONE_LAYER), active_max=BATCH
    )
    yield bench
    bench.thread.stop()


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture(scope="module")
def matcher_of(bench, threads):
    compiler = compiler_of(bench.tokenizer, TOKENS)
    return lambda output: AnswerMatcher(compiler.compile(output), threads)


def together(bench, sequences):
    """Submit sequences so that every run forms the same batches; return their events."""
    gate = threading.Event()
    bench.thread.call(gate.wait)
    for sequence, _ in sequences:
        bench.thread.submit(sequence)
    gate.set()
    return [wait(events) for _, events in sequences]


def collect_events(sequence):
    """Return a list that collects the sequence's events."""
    emit, seen = sequence.emit, []

    def note(event):
        seen.append(event)
        emit(event)

    sequence.emit = note
    return seen


def logprobs_of(events):
    return [entry for e in events if isinstance(e, Produced) for entry in e.logprobs]


FREE = [
    Sampling(max_tokens=LONG, ignore_eos=True),
    Sampling(max_tokens=LONG, ignore_eos=True, temperature=1.0, seed=4, top_p=0.9),
    Sampling(max_tokens=LONG, ignore_eos=True, logprobs=3, repetition_penalty=1.2),
]


@pytest.mark.usefixtures("order")
def test_free_answers_are_unaffected_by_formatted_neighbours(bench, matcher_of):
    def run(neighbours):
        sequences = [bench.make(prompt_of(30 + n, n), s) for n, s in enumerate(FREE)]
        beside = [
            bench.make(prompt_of(40 + n, 9 + n), Sampling(max_tokens=2 * LONG, **more), **hooks)
            for n, (more, hooks) in enumerate(neighbours)
        ]
        # Equal lengths, so that batches are the same and only sampled tokens differ.
        seen = [collect_events(sequence) for sequence, _ in sequences]
        out = together(bench, [*sequences, *beside])
        caches = [bench.bytes_of(sequence.cache) for sequence, _ in sequences]
        tops = [logprobs_of(events) for events in seen]
        assert any(tops)
        return (
            [one.answer_ids for one in out[: len(sequences)]],
            caches,
            tops,
            out[len(sequences) :],
        )

    plain = run([({"ignore_eos": True}, {}), ({"ignore_eos": True}, {})])
    formatted = run(
        [
            ({}, {"matcher": matcher_of(STEADY)}),
            ({"temperature": 1.0}, {"matcher": matcher_of(STEADY)}),
        ]
    )
    assert plain[:3] == formatted[:3]
    for one in formatted[3]:
        assert one.reason is FinishReason.LENGTH
        assert set(one.answer_text) <= set("abcdefghijklmnopqrstuvwxyz ")


def sampling_of(seed):
    rng = random.Random(seed)
    return Sampling(
        max_tokens=160,
        seed=seed,
        temperature=rng.choice([0.0, 0.7, 1.0, 2.0]),
        top_p=rng.choice([1.0, 0.5, 0.01]),
        top_k=rng.choice([0, 3]),
        min_p=rng.choice([0.0, 0.2]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        logit_bias=rng.choice([{}, {str(rng.randrange(TOKENS)): 50.0, "2": 20.0}]),
        logprobs=rng.choice([None, 2]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", sample([SEEDS, SEEDS_NIGHTLY], SEEDS))
def test_every_finished_answer_fits_its_schema(bench, matcher_of, count):
    schemas = [random_schema(random.Random(seed)) for seed in range(count)]
    stopped = 0
    for first in range(0, count, BATCH - 2):
        batch = range(first, min(count, first + BATCH - 2))
        sequences = [
            bench.make(
                prompt_of(12, seed), sampling_of(seed), matcher=matcher_of(schema(schemas[seed]))
            )
            for seed in batch
        ]
        free = [bench.make(prompt_of(12, seed), Sampling(max_tokens=40)) for seed in (1, 2)]
        for seed, end in zip(batch, together(bench, [*sequences, *free]), strict=False):
            assert isinstance(end, Ended)
            if end.reason is not FinishReason.STOP:
                continue
            stopped += 1
            assert end.answer_ids[-1] == 2
            value = json.loads(end.answer_text.removesuffix("<|im_end|>"))
            jsonschema.validate(value, schemas[seed], jsonschema.Draft202012Validator)
    assert stopped > 0.9 * count


def test_cut_answer_has_max_tokens(bench, matcher_of):
    sequence, events = bench.make(
        prompt_of(12, 3),
        Sampling(max_tokens=5),
        matcher=matcher_of(schema({"const": "the cat sat"})),
    )
    bench.thread.submit(sequence)
    end = drain_events(events)
    assert (end.reason, len(end.answer_ids)) == (FinishReason.LENGTH, 5)
    assert '"the cat sat"'.startswith(end.answer_text)


def test_log_probabilities_ignore_the_format(bench, matcher_of):
    """Excluded tokens keep their probability, so a sampled one may be improbable."""
    sampling = Sampling(max_tokens=1, logprobs=3)
    free, free_events = bench.make(prompt_of(12, 5), sampling)
    bound, bound_events = bench.make(prompt_of(12, 5), sampling, matcher=matcher_of(regex("[xyz]")))
    seen = [collect_events(free), collect_events(bound)]
    together(bench, [(free, free_events), (bound, bound_events)])
    (own,), (picked,) = map(logprobs_of, seen)
    assert own.alternatives == picked.alternatives
    assert picked.token in "xyz"
    assert LOGPROB_MIN < picked.logprob < own.logprob


def test_format_growing_too_complex_ends_only_its_own_answer(bench, matcher_of):
    alone = bench.answer(prompt_of(20, 1), Sampling(max_tokens=LONG, ignore_eos=True))
    free = bench.make(prompt_of(20, 1), Sampling(max_tokens=LONG, ignore_eos=True))
    steady = bench.make(prompt_of(20, 2), Sampling(max_tokens=LONG), matcher=matcher_of(STEADY))
    bad = bench.make(prompt_of(20, 3), Sampling(max_tokens=LONG), matcher=matcher_of(TOO_COMPLEX))
    first, second, third = together(bench, [free, steady, bad])
    assert first.answer_ids == alone
    assert second.reason is FinishReason.LENGTH
    assert isinstance(third, Broke)
    assert isinstance(third.error, RejectedError)
    assert third.error.code == "invalid_format"
