"""Caches that are edited in memory: rows move as bytes, holes are computed, nothing is lost."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from fabric.kvcache.arrangement import Move, Shift
from fabric.settings import KvBits
from fabric.turn.generation import Sampling
from node.mlx.engine import Engine
from node.mlx.probe.probe import fit_engine
from node.mlx.resident_cache import ResidentCache
from tests.support.architectures import ARCHITECTURES, CHUNKED
from tests.support.cache_paths import logits_after, prompt_of
from tests.support.samples import sample
from tests.support.shiftable import PLAIN, SHIFTABLE, USUAL, engine_of
from tests.support.shifted_caches import ROUNDING, by_hand, filled, relative_error
from tests.support.tiny_models import build_model

TOKENS = 300
EVERY = pytest.mark.parametrize(
    "name",
    sample(SHIFTABLE, "llama3", "some_dims", "expanded", "latent", "indexed"),
)
ONE_OF_EACH_CLASS = pytest.mark.parametrize(
    "name", sample(["llama3", "latent", "indexed"], "llama3", "latent")
)


def computed_cache(engine: Engine, prompt: list[int]) -> ResidentCache:
    cache = engine.new_cache(len(prompt))
    engine.prefill(cache, prompt)
    return cache


def all_bytes(cache: ResidentCache) -> bytes:
    cache.settle()
    return bytes(cache.gather(0, cache.tokens_count))


def put(cache: ResidentCache, start: int, rows: memoryview, tokens_count: int) -> None:
    """Write rows as a restore does, from what `gather` returned."""
    at = 0
    for place in cache.places(start, start + tokens_count):
        place[:] = np.frombuffer(rows, np.uint8, place.size, at).reshape(place.shape)
        at += place.size


OLD, NEW = prompt_of(TOKENS), prompt_of(25, seed=5)
# Remove 80:140, and replace 220:230 by 25 others.
EDITED = [*OLD[:80], *OLD[140:220], *NEW, *OLD[230:]]
MOVES = [Move(0, 80, 0), Move(140, 220, 80), Move(230, 300, 185)]
SHIFTS = (Shift(80, 160, -60), Shift(185, 255, -45))


@EVERY
def test_edited_cache_of_a_one_layer_model_equals_a_computed_one(name: str) -> None:
    """A row of one layer depends on its own token only: an edit leaves no trace."""
    engine = engine_of(name, PLAIN, layers_count=1)
    cache = computed_cache(engine, OLD)
    cache.rearrange(MOVES)
    assert (cache.tokens_count, cache.ahead, cache.shifts) == (160, ((185, 255),), SHIFTS)
    assert cache.ahead_tokens == 70
    engine.prefill(cache, NEW)
    assert (cache.tokens_count, cache.ahead) == (255, ())
    assert {leaf.offset for leaf in cache.leaves} == {255}

    want = logits_after(engine, computed_cache(engine, EDITED), prompt_of(3))
    assert relative_error(logits_after(engine, cache, prompt_of(3)), want) < ROUNDING
    if name != "no_layer":
        cache.rewind(255)
        cache.hold(255, (), ())
        assert relative_error(logits_after(engine, cache, prompt_of(3)), want) > 1e-2


@EVERY
def test_moved_codes_are_as_accurate_as_computed_ones(name: str) -> None:
    """This holds at any distance; quantizing a rotated row again would not be more accurate."""
    exact, engine = (engine_of(name, bits, layers_count=1) for bits in (PLAIN, USUAL))
    edited = computed_cache(engine, OLD)
    edited.rearrange(MOVES)
    engine.prefill(edited, NEW)
    caches = computed_cache(exact, EDITED), computed_cache(engine, EDITED), edited
    engines = exact, engine, engine
    want, fresh, moved = map(logits_after, engines, caches, [prompt_of(8)] * 3)

    assert np.linalg.norm(moved - want) < 1.3 * np.linalg.norm(fresh - want)


@ONE_OF_EACH_CLASS
@pytest.mark.parametrize("bits", [USUAL, PLAIN], ids=["quantized", "plain"])
def test_hundred_edits_and_their_inverses_change_no_bit(name: str, bits: KvBits) -> None:
    engine = engine_of(name, bits)
    cache = filled(engine, TOKENS)
    before, want = all_bytes(cache), logits_after(engine, filled(engine, TOKENS), prompt_of(3))
    for number in range(50):
        hole = 1 + number % 7
        cache.rearrange([Move(0, 40, 0), Move(40, TOKENS, 40 + hole)])
        assert (cache.tokens_count, cache.ahead) == (40, ((40 + hole, TOKENS + hole),))
        cache.rearrange([Move(0, 40, 0), Move(40 + hole, TOKENS + hole, 40)])

    assert (cache.tokens_count, cache.ahead, cache.shifts) == (TOKENS, (), ())
    assert all_bytes(cache) == before
    assert np.array_equal(logits_after(engine, cache, prompt_of(3)), want)


@ONE_OF_EACH_CLASS
def test_hundred_edits_equal_one_combined_edit(name: str) -> None:
    """Each removes a token or two; bits, shifts and logits are those of one edit."""
    engine = engine_of(name)
    cache, left = filled(engine, 2 * TOKENS), list(range(2 * TOKENS))
    for number in range(100):
        at, count = 20 + 7 * number % 300, 1 + number % 2
        cache.rearrange([Move(0, at, 0), Move(at + count, cache.tokens_count, at)])
        del left[at : at + count]
    once, start, moves = filled(engine, 2 * TOKENS), 0, []
    for at in range(1, len(left) + 1):
        if at == len(left) or left[at] != left[at - 1] + 1:
            moves.append(Move(left[start], left[at - 1] + 1, start))
            start = at
    once.rearrange(moves)

    assert len(cache.shifts) > 50
    assert (cache.tokens_count, cache.shifts) == (len(left), once.shifts)
    assert all_bytes(cache) == all_bytes(once)
    got = logits_after(engine, cache, prompt_of(3))
    assert np.array_equal(got, logits_after(engine, once, prompt_of(3)))
    still = filled(engine, 2 * TOKENS)
    still.rearrange(moves)
    still.hold(len(left), (), ())
    want = logits_after(engine, by_hand(still, once.shifts), prompt_of(3))
    assert relative_error(got, want) < 2e-3


@ONE_OF_EACH_CLASS
@pytest.mark.parametrize("chunks", sample([(25,), (9, 16), (1,) * 25], (9, 16)), ids=len)
def test_hole_is_computed_independently_of_rows_after_it(
    name: str, chunks: tuple[int, ...]
) -> None:
    """In chunks of any size: equal bit for bit to a cache assembled by hand."""
    engine, source = engine_of(name), computed_cache(engine_of(name), OLD)
    edited = computed_cache(engine, OLD)
    edited.rearrange(MOVES)
    rebuilt = engine.new_cache(255)
    for start, end, to in ((0, 80, 0), (140, 220, 80)):
        put(rebuilt, to, source.gather(start, end), end - start)
    rebuilt.hold(160, (), SHIFTS[:1])
    for cache in (edited, rebuilt):
        at = 0
        for count in chunks:
            if count > 1:
                engine.prefill(cache, NEW[at : at + count])
            else:
                engine.feed([cache], [mx.array(NEW[at : at + 1], mx.uint32)])
            at += count
    assert rebuilt.tokens_count == 185
    rebuilt.settle()
    put(rebuilt, 185, source.gather(230, 300), 70)
    rebuilt.hold(255, (), SHIFTS)

    assert (edited.tokens_count, edited.ahead, edited.shifts) == (255, (), rebuilt.shifts)
    assert all_bytes(edited) == all_bytes(rebuilt)
    want = logits_after(engine, rebuilt, prompt_of(3))
    assert np.array_equal(logits_after(engine, edited, prompt_of(3)), want)


@ONE_OF_EACH_CLASS
def test_several_holes_are_filled_in_order(name: str) -> None:
    """A hole at the start, one that grows the cache, and a cache restored to its places."""
    engine = engine_of(name, PLAIN, layers_count=1)
    new = prompt_of(700, seed=8)
    prompt = [*new[:30], *OLD[:100], *new[30:], *OLD[100:200]]
    cache = computed_cache(engine, OLD)
    cache.rearrange([Move(0, 0, 0), Move(0, 100, 30), Move(100, 200, 800)])
    read = engine.new_cache(900)
    source = computed_cache(engine, OLD)
    put(read, 30, source.gather(0, 100), 100)
    put(read, 800, source.gather(100, 200), 100)
    read.hold(0, [(30, 130), (800, 900)], [Shift(30, 130, 30), Shift(800, 900, 700)])
    want = logits_after(engine, computed_cache(engine, prompt), prompt_of(3))

    for each in (cache, read):
        assert (each.tokens_count, each.ahead) == (0, ((30, 130), (800, 900)))
        counts = []
        while each.tokens_count < 900:
            at = each.tokens_count
            engine.prefill(each, prompt[at : min(at + 256, each.ahead[0][0])])
            counts.append(each.tokens_count)
        assert counts == [130, 386, 642, 900]
        assert relative_error(logits_after(engine, each, prompt_of(3)), want) < 10 * ROUNDING


@pytest.fixture
def engine() -> Engine:
    return engine_of("llama3")


def test_removal_without_insertion_leaves_no_hole(engine: Engine) -> None:
    cache = filled(engine, TOKENS)
    cache.rearrange([Move(0, 50, 0), Move(60, 100, 50), Move(130, TOKENS, 90)])

    assert (cache.tokens_count, cache.ahead) == (260, ())
    assert cache.shifts == (Shift(50, 90, -10), Shift(90, 260, -40))


def test_replacement_of_equal_length_moves_no_rows(engine: Engine) -> None:
    """Rows after the edit are in their places already."""
    cache = filled(engine, TOKENS)
    arrays = [array for leaf in cache.leaves for array in leaf.state]
    cache.rearrange([Move(0, 50, 0), Move(60, TOKENS, 60)])

    assert (cache.tokens_count, cache.ahead, cache.shifts) == (50, ((60, TOKENS),), ())
    after = [array for leaf in cache.leaves for array in leaf.state]
    assert all(a is b for a, b in zip(arrays, after, strict=True))


def test_step_never_overwrites_rows_after_a_hole(engine: Engine) -> None:
    cache = filled(engine, TOKENS)
    cache.rearrange([Move(0, 50, 0), Move(60, TOKENS, 55)])
    with pytest.raises(AssertionError, match="no step overwrites"):
        engine.prefill(cache, prompt_of(6))
    with pytest.raises(AssertionError, match="no rows are held after"):
        engine.start(cache, prompt_of(51), Sampling(max_tokens=1), 0)

    assert (cache.tokens_count, cache.ahead) == (50, ((55, 295),))


def test_failed_step_leaves_the_hole_unchanged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds too for the step that would fill the hole."""
    caches = [filled(engine, TOKENS) for _ in range(2)]
    for cache in caches:
        cache.rearrange(MOVES)
    cache, undisturbed = caches
    with monkeypatch.context() as patch:
        patch.setattr(cache, "settle", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.prefill(cache, NEW)
    assert (cache.tokens_count, cache.ahead, cache.shifts) == (160, ((185, 255),), SHIFTS)
    assert {leaf.offset for leaf in cache.leaves} == {160}
    mark = cache.mark()
    engine.prefill(cache, NEW)
    cache.undo(mark)
    assert (cache.tokens_count, cache.ahead) == (160, ((185, 255),))

    for each in caches:
        engine.prefill(each, NEW)
    want = logits_after(engine, undisturbed, prompt_of(3))
    assert np.array_equal(logits_after(engine, cache, prompt_of(3)), want)


@pytest.mark.parametrize("count", [40, 100, 160])
def test_rewind_keeps_the_first_tokens_only(engine: Engine, count: int) -> None:
    """Rows after holes are dropped, and shifts are cut."""
    cache, still = filled(engine, TOKENS), filled(engine, TOKENS)
    for each in (cache, still):
        each.rearrange(MOVES)
    cache.rewind(count)
    shifts = tuple(Shift(80, min(count, 160), -60) for _ in range(count > 80))
    still.hold(count, (), ())

    assert (cache.tokens_count, cache.ahead, cache.shifts) == (count, (), shifts)
    got = logits_after(engine, cache, prompt_of(3))
    assert relative_error(got, logits_after(engine, by_hand(still, shifts), prompt_of(3))) < 2e-3


def test_released_room_excludes_rows_after_holes(engine: Engine) -> None:
    cache = engine.new_cache(4_096)
    cache.fill(TOKENS, mx.random.key(0))
    cache.hold(TOKENS, (), ())
    cache.rearrange([Move(0, 50, 0), Move(60, TOKENS, 700)])
    rows = bytes(filled(engine, TOKENS).gather(60, TOKENS))
    before = cache.size_bytes
    cache.give_back_room(100)
    cache.hold(940, (), ())

    assert cache.size_bytes < before / 2
    assert bytes(cache.gather(700, 940)) == rows


def test_edit_failing_midway_keeps_rows_before_the_edit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory is short: rows before the edit are never touched."""
    cache = filled(engine, TOKENS, (Shift(20, 90, 5),))
    with monkeypatch.context() as patch:
        patch.setattr(cache.leaves[2], "rearrange", lambda moves: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cache.rearrange(MOVES)
    assert (cache.tokens_count, cache.ahead, cache.shifts) == (80, (), (Shift(20, 80, 5),))

    undisturbed = filled(engine, TOKENS, (Shift(20, 90, 5),))
    undisturbed.rewind(80)
    want = logits_after(engine, undisturbed, prompt_of(3))
    assert np.array_equal(logits_after(engine, cache, prompt_of(3)), want)


def test_edit_needs_one_extra_layer_of_memory(engine: Engine) -> None:
    cache = engine.new_cache(16_384)
    cache.hold(16_384, (), ())
    layer_bytes = cache.leaves[0].nbytes
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    cache.rearrange([Move(0, 50, 0), Move(60, 16_384, 50)])

    assert layer_bytes / 2 < mx.get_peak_memory() - before < 1.5 * layer_bytes
    assert mx.get_active_memory() - before < layer_bytes / 4


@pytest.mark.parametrize(
    "edit",
    [
        lambda cache: cache.rearrange([Move(0, 5, 0), Move(6, 10, 5)]),
        lambda cache: cache.hold(5, [(6, 10)], ()),
        lambda cache: cache.hold(10, (), [Shift(6, 10, 1)]),
    ],
    ids=["rearrange", "ahead", "shifts"],
)
@pytest.mark.parametrize("name", sample(["llama4", "qwen3_next"], "qwen3_next"))
def test_unmovable_rows_are_not_moved(name: str, edit: Callable[[Any], None]) -> None:
    """Chunked and recurrent layers do not support moved rows."""
    config = CHUNKED if name == "llama4" else ARCHITECTURES[name]
    cache = fit_engine(build_model(config), USUAL).new_cache(10)
    cache.hold(10, (), ())
    with pytest.raises(AssertionError, match="rows stay in place"):
        edit(cache)
