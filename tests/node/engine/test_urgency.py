"""A background sequence delays an interactive one by no more than the chunk being computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.turn.generation import Priority
from node.engine.sequence import Produced, Sequence
from node.mlx.resident_cache import ResidentCache
from tests.node.engine_bench import GREEDY, Bench, Events, drain_events, prompt_of
from tests.support.tiny_models import ONE_LAYER, write_model

LONG, SHORT = 4_000, 700
ROW_BYTES = 1_000  # as the budget counts them here
BACKGROUND = Priority.BACKGROUND


class Chunks:
    """Prefill chunks of a real engine, and an arrival while one of them is computed."""

    def __init__(self, bench: Bench) -> None:
        engine = bench.thread.call(lambda: bench.thread.engine).result()
        self.caches: list[ResidentCache] = []  # of each chunk, in order of their starts
        self.arrival: tuple[int, Sequence] | None = None  # the chunk's number, and the arrival
        compute = engine.prefill

        def prefill(cache: ResidentCache, tokens: list[int]) -> None:
            self.caches.append(cache)
            if self.arrival is not None and len(self.caches) == self.arrival[0]:
                bench.thread.submit(self.arrival[1])
            compute(cache, tokens)

        engine.prefill = prefill  # type: ignore[method-assign]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(write_model(tmp_path / "llama", ONE_LAYER))
    yield made
    made.thread.stop()


def chunks_before_answer(bench: Bench, chunks: Chunks, urgent: Sequence, others: list[Sequence]):
    """Submit `others`; return a list for the number of chunks begun by urgent's first token."""
    seen: list[int] = []
    emit = urgent.emit

    def watch(event: object) -> None:
        if isinstance(event, Produced) and not seen:
            seen.append(len(chunks.caches))
        emit(event)  # type: ignore[arg-type]

    urgent.emit = watch
    chunks.arrival = (3, urgent)
    for other in others:
        bench.thread.submit(other)
    return seen


@pytest.mark.parametrize("is_promoted", [False, True], ids=["waiting", "promoted"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_interactive_prompt_waits_for_the_chunk_being_computed(
    bench: Bench, count: int, is_promoted: bool
) -> None:
    chunks = Chunks(bench)
    slow = [
        bench.make(prompt_of(LONG, seed), GREEDY, bench.cache(LONG + 64), priority=BACKGROUND)
        for seed in range(count)
    ]
    slow[0][0].is_promoted = is_promoted
    urgent, urgent_events = bench.make(prompt_of(SHORT, 99), GREEDY, bench.cache(SHORT + 64))
    seen = chunks_before_answer(bench, chunks, urgent, [sequence for sequence, _ in slow])
    drain_events(urgent_events)
    meanwhile = chunks.caches[3 : seen[0]]

    assert all(cache is urgent.cache for cache in meanwhile), "no background chunk ran"
    assert len(meanwhile) >= 1
    for _, events in slow:
        assert len(drain_events(events).answer_ids) == GREEDY.max_tokens


def test_an_interactive_prompt_takes_the_memory_of_a_background_one(bench: Bench) -> None:
    """The background prompt is handed over, and computed later."""
    bench.thread.budget.resize(ROW_BYTES * (LONG + 512))
    chunks = Chunks(bench)
    slow, slow_events = with_memory(bench, LONG, 1, priority=BACKGROUND)
    urgent, urgent_events = with_memory(bench, SHORT, 99)
    seen = chunks_before_answer(bench, chunks, urgent, [slow])
    assert len(drain_events(urgent_events).answer_ids) == GREEDY.max_tokens
    preempted = drain_events(slow_events)

    assert all(cache is urgent.cache for cache in chunks.caches[3 : seen[0]])
    assert preempted.is_handover
    assert preempted.is_preempted


def test_interactive_prompts_take_no_memory_of_each_other(
    bench: Bench,
) -> None:
    bench.thread.budget.resize(ROW_BYTES * (LONG + 512))
    chunks = Chunks(bench)
    first, first_events = with_memory(bench, LONG, 1)
    second, second_events = with_memory(bench, SHORT, 2)
    third, third_events = with_memory(bench, SHORT, 3, priority=BACKGROUND)
    chunks.arrival = (2, second)
    bench.thread.submit(first)
    bench.thread.submit(third)

    assert not drain_events(first_events).is_handover
    assert not drain_events(second_events).is_handover
    assert not drain_events(third_events).is_handover


def with_memory(
    bench: Bench, tokens: int, seed: int, *, priority: Priority = Priority.INTERACTIVE
) -> tuple[Sequence, Events]:
    return bench.make(
        prompt_of(tokens, seed),
        GREEDY,
        bench.cache(tokens + 64),
        priority=priority,
        reserve_bytes=ROW_BYTES * tokens,
        is_preemptible=lambda: True,
    )
