"""Prompts with rows in place after holes, on the engine's thread with a real model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.kvcache.arrangement import Move, Shift
from node.mlx.resident_cache import ResidentCache
from tests.node.engine_bench import GREEDY, Bench, drain_events, prompt_of
from tests.support.tiny_models import ONE_LAYER, write_model

OLD = prompt_of(900, 1)
NEW = prompt_of(30, 2)
EDITED = [*OLD[:300], *NEW, *OLD[400:], *prompt_of(40, 3)]


@pytest.fixture(params=[False, True], ids=["any chunks", "exact chunks"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    rig = Bench(write_model(tmp_path / "llama", ONE_LAYER), exact_chunks=request.param)
    yield rig
    rig.thread.stop()


def computed_cache(bench: Bench, prompt: list[int]) -> ResidentCache:
    sequence, events = bench.submit(prompt, GREEDY)
    drain_events(events)
    bench.thread.call(lambda: sequence.cache.rewind(len(prompt) - 1)).result()
    return sequence.cache


def test_batched_edited_cache_equals_one_computed_by_hand(
    bench: Bench,
) -> None:
    """The hole is computed in a chunk of its own, then the rest of the prompt, in a batch."""
    caches = [computed_cache(bench, OLD) for _ in range(2)]
    moves = [Move(0, 300, 0), Move(400, 899, 330)]
    for cache in caches:
        bench.thread.call(lambda cache=cache: cache.rearrange(moves)).result()
    reached: list[int] = []
    edited, events = bench.make(EDITED, GREEDY, caches[0], reached=reached.append)
    assert edited.prefill_left == len(EDITED) - 1 - 300 - 499
    others = [bench.submit(prompt_of(count, count), GREEDY)[1] for count in (5, 700)]
    bench.thread.submit(edited)
    answer = drain_events(events).answer_ids
    for other in others:
        drain_events(other)

    def by_hand() -> None:
        for chunk in (NEW, EDITED[829:-1]):
            bench.thread.engine.prefill(caches[1], chunk)

    bench.thread.call(by_hand).result()
    _, again = bench.submit(EDITED, GREEDY, caches[1])

    assert drain_events(again).answer_ids == answer
    assert reached[0] == 829
    assert caches[0].shifts == (Shift(330, 829, -70),)
    for cache in caches:
        bench.thread.call(lambda cache=cache: cache.rewind(len(EDITED) - 1)).result()
    assert bench.bytes_of(caches[0]) == bench.bytes_of(caches[1])
