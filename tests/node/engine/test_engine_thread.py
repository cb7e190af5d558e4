"""The engine thread with a real tiny model: batches, cancels, failures, exact bytes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from fabric.turn.generation import FinishReason, Sampling
from node.engine.sequence import Broke, Ended, Produced
from tests.node.engine_bench import GREEDY, Bench, at_token, drain_events, prompt_of, wait
from tests.support.tiny_models import LLAMA, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny llama."""
    return write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA)


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    """Run one engine thread for the module."""
    rig = Bench(folder)
    yield rig
    rig.thread.stop()


def test_tokens_equal_mlx_lm_with_its_quantized_cache(bench: Bench) -> None:
    """One sequence decodes the same tokens as mlx-lm over the same 4-bit cache."""
    prompt = prompt_of(200, 1)

    def oracle() -> list[int]:
        model, out = bench.loaded.engine.model, []
        caches = [QuantizedKVCache(64, 4) for _ in model.layers]
        model(mx.array([prompt[:-1]]), cache=caches)
        token = mx.array([prompt[-1:]])
        for _ in range(12):
            token = mx.argmax(model(token, cache=caches)[:, -1], axis=-1, keepdims=True)
            out.append(int(token.item()))
        return out

    want = bench.thread.call(oracle).result()
    _, events = bench.submit(prompt, GREEDY)

    assert want == drain_events(events).answer_ids


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(max_tokens=12, temperature=0.9, top_p=0.9, top_k=40, seed=5, ignore_eos=True),
        Sampling(max_tokens=12, logprobs=3, ignore_eos=True),
        Sampling(max_tokens=12, repetition_penalty=1.3, ignore_eos=True),
    ],
    ids=["greedy", "seeded", "logprobs", "penalty"],
)
def test_batched_equals_alone(bench: Bench, sampling: Sampling) -> None:
    """A sequence's tokens do not depend on the other sequences in the batch."""
    prompts = [prompt_of(count, count) for count in (150, 3, 40)]
    alone = [bench.answer(prompt, sampling) for prompt in prompts]

    together = [bench.submit(prompt, sampling)[1] for prompt in prompts]

    assert alone == [drain_events(events).answer_ids for events in together]


def test_cache_holds_prompt_and_answer_after_the_end(bench: Bench) -> None:
    """After the end every emitted token is in the cache."""
    sequence, events = bench.submit(prompt_of(30, 2), GREEDY)
    end = drain_events(events)

    assert end.reason is FinishReason.LENGTH
    assert sequence.cache.tokens_count == 30 + 12


def test_cache_restored_from_bytes_decodes_bit_equal(bench: Bench) -> None:
    """A cache rebuilt from its bytes continues with identical log probabilities."""
    sampling = Sampling(max_tokens=8, logprobs=5, ignore_eos=True)
    sequence, events = bench.submit(prompt_of(300, 3), GREEDY)
    history = prompt_of(300, 3) + drain_events(events).answer_ids
    raw = bench.bytes_of(sequence.cache)
    count = sequence.cache.tokens_count
    copy = bench.cache(count)
    at = 0
    for view in copy.places(0, count):
        view[:] = np.frombuffer(raw, np.uint8, view.size, at).reshape(view.shape)
        at += view.size
    del view
    copy.assume(count)
    longer = history + prompt_of(20, 4)

    answers = []
    for cache in (sequence.cache, copy):
        _, events = bench.submit(longer, sampling, cache)
        produced = []
        while not isinstance(event := events.get(timeout=60), Ended):
            if isinstance(event, Produced):
                produced.append(event.logprobs)
        answers.append(produced)

    assert answers[0] == answers[1]
    assert bench.bytes_of(sequence.cache) == bench.bytes_of(copy)


def test_cancel_keeps_cache_and_tokens_in_step(bench: Bench) -> None:
    """A cancelled sequence's cache holds exactly the prompt and the delivered tokens."""
    sampling = Sampling(max_tokens=10_000, ignore_eos=True)
    sequence, events = bench.submit(prompt_of(20, 5), sampling)
    for _ in range(4):
        events.get(timeout=60)
    sequence.cancelled.set()
    bench.thread.wake()
    end = drain_events(events)

    assert end.reason is None
    assert 20 + len(end.answer_ids) == sequence.cache.tokens_count


COMPANY = [
    GREEDY,
    Sampling(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True),
    Sampling(max_tokens=12, temperature=0.7, top_p=0.8, min_p=0.02, seed=1, ignore_eos=True),
    Sampling(max_tokens=12, temperature=1.2, top_k=30, seed=2, logprobs=2, ignore_eos=True),
    Sampling(max_tokens=12, temperature=0.9, frequency_penalty=0.8, seed=3, ignore_eos=True),
]


def test_seeded_answer_is_independent_of_the_batch(bench: Bench) -> None:
    """Five sampling methods in one batch give the tokens that each gives alone."""
    prompts = [prompt_of(count, count) for count in (120, 5, 60, 33, 2)]
    alone = [bench.answer(*one) for one in zip(prompts, COMPANY, strict=True)]
    for order in (range(5), reversed(range(5))):
        events = {at: bench.submit(prompts[at], COMPANY[at])[1] for at in order}
        assert alone == [drain_events(events[at]).answer_ids for at in range(5)]
    other_seed = replace(COMPANY[1], seed=9)
    assert bench.answer(prompts[1], other_seed) != alone[1]


@pytest.mark.parametrize("what", ["cache", "sampler"])
def test_failing_sequence_does_not_affect_the_batch(bench: Bench, what: str) -> None:
    """A sequence that fails in a batch neither ends nor changes the others."""
    prompts = [prompt_of(40, 6), prompt_of(50, 7), prompt_of(60, 8)]
    chosen = [replace(COMPANY[at], max_tokens=30) for at in (0, 4, 1)]
    alone = [bench.answer(*one) for one in zip(prompts[:2], chosen[:2], strict=True)]
    good = [bench.make(*one) for one in zip(prompts[:2], chosen[:2], strict=True)]
    bad, bad_events = bench.make(prompts[2], chosen[2])

    def fail() -> None:
        if what == "cache":
            bad.cache.leaves[1] = bad.cache.layers[1] = object()
        else:
            bad.slot.sampler.processors.append(lambda history, logits: logits[9, 9, 9])

    at_token(bad, 4, fail)
    for sequence in (bad, good[0][0], good[1][0]):  # short prompts start and are sampled first
        bench.thread.submit(sequence)

    assert isinstance(wait(bad_events), Broke)
    assert alone == [drain_events(events).answer_ids for _, events in good]
    assert [sequence.cache.tokens_count for sequence, _ in good] == [40 + 30, 50 + 30]


def test_exact_chunks_make_warm_bit_equal_to_cold(folder: Path) -> None:
    """On the fixed grid, computing on top of a cut equals computing from the start."""
    bench = Bench(folder, exact_chunks=True)
    prompt = prompt_of(700, 8)
    one = Sampling(max_tokens=1, ignore_eos=True)
    cold, events = bench.submit(prompt, one)
    drain_events(events)
    warm, events = bench.submit(prompt_of(700, 8)[:600], one)
    drain_events(events)
    warm.cache.rewind(512)
    again, events = bench.submit(prompt, one, warm.cache)
    drain_events(events)

    assert bench.bytes_of(cold.cache) == bench.bytes_of(again.cache)
    bench.thread.stop()


def test_stop_string_is_found_across_tokens_and_hidden(bench: Bench) -> None:
    """Decoding ends at a stop string, which the client does not see."""
    prompt = prompt_of(60, 9)
    full = drain_events(
        bench.submit(prompt, Sampling(max_tokens=30, ignore_eos=True))[1]
    ).answer_text
    stop = full[len(full) // 2 : len(full) // 2 + 4]
    _, events = bench.submit(prompt, Sampling(max_tokens=30, stop=(stop,), ignore_eos=True))
    seen = ""
    while not isinstance(event := events.get(timeout=60), Ended):
        if isinstance(event, Produced):
            seen += event.shown.text

    assert stop == event.stop_string
    assert full[: full.index(stop)] == seen + event.shown.text
