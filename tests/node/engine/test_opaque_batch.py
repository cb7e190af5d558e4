"""Batches over mlx-lm's own caches, which cannot go back to their state before a failed step."""

import pytest

from fabric.errors import FabricError
from node.engine.sequence import Broke
from node.grammar.compiler import full_mask
from node.mlx.engine import Engine
from tests.node.engine_bench import GREEDY, Bench, drain_events, prompt_of, wait
from tests.support.tiny_models import ONE_LAYER, write_model

FAILS_AFTER = 3


class FailingMatcher:
    """A matcher that allows every token, and fails after a few."""

    openings = ()

    def __init__(self, vocabulary_size):
        self._vocabulary_size = vocabulary_size
        self.taken_count = 0

    def take(self, token):
        self.taken_count += 1

    def mask(self):
        if self.taken_count == FAILS_AFTER:
            message = "the format is too complex"
            raise FabricError(message, code="format_too_complex")
        return full_mask(self._vocabulary_size)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    bench = Bench(write_model(tmp_path_factory.mktemp("model") / "model", ONE_LAYER))
    scheduler = bench.thread._scheduler
    bench.thread.call(
        lambda: setattr(scheduler, "engine", Engine(scheduler.engine.model, None))
    ).result()
    yield bench
    bench.thread.stop()


@pytest.mark.usefixtures("order")
def test_failed_sequence_changes_no_answer_of_its_batch(bench):
    expected = bench.answer(prompt_of(20, 1), GREEDY)
    matcher = FailingMatcher(bench.thread.engine.limits.vocabulary_size)
    sound, events = bench.make(prompt_of(20, 1), GREEDY)
    failing, failing_events = bench.make(prompt_of(20, 2), GREEDY, matcher=matcher)
    bench.thread.submit(sound)
    bench.thread.submit(failing)

    broke = wait(failing_events)
    assert isinstance(broke, Broke)
    assert broke.error.code == "format_too_complex"
    assert drain_events(events).answer_ids == expected


def test_undone_cache_is_refused(bench):
    def use_after_undo():
        engine = bench.thread.engine
        cache = engine.new_cache(0)
        engine.prefill(cache, prompt_of(8, 1))
        slot = engine.start(cache, [*prompt_of(8, 1), 5], GREEDY, 0)
        engine.prepare([slot]).undo()
        with pytest.raises(FabricError, match="cannot be used again"):
            engine.prepare([slot])

    bench.thread.call(use_after_undo).result()
