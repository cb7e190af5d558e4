"""Rewinding in memory: to any token, or to a state that is still held."""

import sys
import threading
import time
from functools import cache as remembered

import mlx.core as mx
import numpy as np
import pytest

from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.settings import KvBits
from fabric.turn.generation import Sampling
from node.limits import STATES_HOT_MAX
from node.mlx.engine import Engine
from node.mlx.probe.probe import fit_engine
from node.mlx.resident_cache import ResidentCache
from tests.support.architectures import ARCHITECTURES
from tests.support.cache_paths import logits_after, prompt_of
from tests.support.tiny_models import build_model

HANG_S = 60.0

RECURRENT = ("qwen3_5", "kimi_linear")
EVERY = pytest.mark.parametrize("name", RECURRENT)


@remembered
def engine_of(name: str) -> Engine:
    return fit_engine(build_model(ARCHITECTURES[name]), KvBits())


def prefilled(engine: Engine, prompt: list[int], *stops: int) -> ResidentCache:
    """Prefill up to each stop, and keep the state there."""
    cache = engine.new_cache(len(prompt))
    for stop in stops:
        engine.prefill(cache, prompt[cache.tokens_count : stop])
        cache.take_snapshot()
    return cache


@EVERY
def test_cache_rewinds_to_a_state_in_memory(name: str) -> None:
    """Bit for bit, also after decoding, alone and out of a batch, and again after that."""
    engine, prompt = engine_of(name), prompt_of(100)
    want = logits_after(engine, prefilled(engine, prompt, 40), prompt_of(4))
    cache = prefilled(engine, prompt, 40, 60)
    cache.snapshots.clear()  # they are saved by now
    engine.feed([cache], [mx.array([5], mx.uint32)])
    other = prefilled(engine, prompt_of(33), 33)
    engine.feed([cache, other], [mx.array([5], mx.uint32)] * 2)

    for _ in range(2):
        assert cache.can_rewind(40)
        cache.rewind(40)
        assert cache.tokens_count == 40
        assert np.array_equal(logits_after(engine, cache, prompt_of(4)), want)


@EVERY
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("is_read_first", [True, False], ids=["read first", "launched first"])
def test_cache_rewinds_to_the_state_before_the_last_token(
    name: str, rows: int, *, is_read_first: bool
) -> None:
    """Bit for bit, alone or in a batch, whether tokens are read before or after they are fed."""
    engine, prompt = engine_of(name), prompt_of(20)
    caches = [prefilled(engine, prompt, len(prompt) - 1) for _ in range(rows)]
    slots = [engine.start(cache, prompt, Sampling(max_tokens=9), 1) for cache in caches]
    slot, cache = slots[-1], caches[-1]
    slot.keeps_marks = True
    sampled: list[int] = []
    engine.launch(engine.prepare(slots))
    while len(sampled) < 5:
        prepared = None if is_read_first else engine.prepare(slots)
        sampled.append(engine.read(slot).token)
        if is_read_first and len(sampled) == 3:
            mark = slot.mark_before_read
        engine.launch(prepared or engine.prepare(slots))
        if not is_read_first and len(sampled) == 3:
            mark = slot.mark_before_read
    assert mark is not None
    cache.take_marked(mark)
    at = len(prompt) + 2
    assert mark.tokens_count == at
    assert cache.gather_snapshot(at) == _state_of(engine, prompt, sampled[:2], rows)
    assert cache.rewind_point(cache.tokens_count - 1) == at
    cache.rewind(at)
    assert slots[0].mark_before_read is None or rows == 1


def _state_of(engine: Engine, prompt: list[int], sampled: list[int], rows: int) -> memoryview:
    """Return the state after these tokens, fed one by one as in decoding."""
    caches = [prefilled(engine, prompt, len(prompt) - 1) for _ in range(rows)]
    for token in [prompt[-1], *sampled]:
        engine.feed(caches, [mx.array([token], mx.uint32)] * rows)
    cache = caches[-1]
    cache.take_snapshot()
    return cache.gather_snapshot(len(prompt) + len(sampled))


@EVERY
def test_recurrent_cache_rewinds_to_held_states_only(name: str) -> None:
    """There is no rewind point between two states or after the last one."""
    cache = prefilled(engine_of(name), prompt_of(100), 40, 60, 80)

    assert [count for count in range(120) if cache.can_rewind(count)] == [0, 40, 60, 80]
    assert [cache.rewind_point(limit) for limit in (100, 80, 79, 60, 59, 39, 0)] == [
        80, 80, 60, 60, 40, 0, 0,
    ]  # fmt: skip
    cache.rewind(60)
    assert [count for count in range(120) if cache.can_rewind(count)] == [0, 40, 60]
    cache.rewind(0)
    assert cache.rewind_point(100) == 0


@EVERY
def test_held_states_are_bounded_and_counted_once(name: str) -> None:
    """The newest stay; the current state takes no extra memory, held or about to be saved."""
    engine, prompt = engine_of(name), prompt_of(200)
    cache = prefilled(engine, prompt, 40)
    bare = engine.new_cache(len(prompt))
    engine.prefill(bare, prompt[:40])
    state_bytes = engine.spec.kv_bytes(0, CacheGroup.STATE)
    assert cache.size_bytes == bare.size_bytes

    cache = prefilled(engine, prompt, *range(20, 200, 20))
    cache.snapshots.clear()
    assert len(cache.states) == STATES_HOT_MAX
    assert max(cache.states) == 180
    assert cache.size_bytes == bare.size_bytes + (STATES_HOT_MAX - 1) * state_bytes


@EVERY
def test_cache_rewinds_to_a_restored_state(name: str) -> None:
    """A state read from disk is not read again."""
    engine, prompt = engine_of(name), prompt_of(60)
    cache = engine.new_cache(len(prompt))
    cache.assume(40)
    engine.prefill(cache, prompt[40:])

    assert cache.rewind_point(59) == 40


def test_models_without_states_rewind_to_any_token() -> None:
    """No states are kept for them, and no checks limit them."""
    engine = fit_engine(build_model(ARCHITECTURES["llama"]), KvBits())
    cache = prefilled(engine, prompt_of(100), 40, 60)

    assert not cache.states
    assert not cache.snapshots
    assert [cache.rewind_point(limit) for limit in (0, 17, 60, 90)] == [0, 17, 60, 60]


def test_cache_size_can_be_read_during_engine_changes() -> None:
    """The loop sums up all caches while the engine may be changing one."""
    cache, over = ResidentCache(ModelCacheSpec(()), 16), threading.Event()

    def change() -> None:
        while not over.is_set():
            for start in range(40):
                cache.slid[start] = memoryview(b"row")
            cache.slid.clear()

    interval_s, changing = sys.getswitchinterval(), threading.Thread(target=change)
    sys.setswitchinterval(1e-6)
    changing.start()
    sizes, began_s = set(), time.monotonic()
    try:
        # On a busy machine the size may be read often before it changes.
        while len(sizes) < 2 and time.monotonic() - began_s < HANG_S:
            sizes |= {cache.size_bytes for _ in range(3_000)}
    finally:
        over.set()
        changing.join()
        sys.setswitchinterval(interval_s)

    assert len(sizes) > 1
