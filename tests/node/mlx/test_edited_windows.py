"""Edited caches with sliding windows: rows after a hole attend to the rows before it."""

import random
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from fabric.kvcache.arrangement import Arrangement, Move, Shift, WindowGrid
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import AGENT_TOKENS_MAX
from fabric.settings import KvBits
from node.mlx.engine import Engine
from node.mlx.probe.probe import fit_engine
from node.mlx.resident_cache import ResidentCache
from tests.support.architectures import ARCHITECTURES, LLAMA, WINDOW_TOKENS
from tests.support.cache_paths import logits_after, prompt_of
from tests.support.samples import sample
from tests.support.shiftable import PLAIN, USUAL
from tests.support.shifted_caches import ROUNDING, by_hand, filled, relative_error
from tests.support.tiny_models import build_model

TOKENS = 900
_OLMO = {**LLAMA, "model_type": "olmo3", "sliding_window": WINDOW_TOKENS}
OLD, NEW = prompt_of(TOKENS), prompt_of(50, seed=5)
# Edits within the windows: 60 and 10 tokens are removed, and 25 inserted twice.
MOVES = [Move(0, 790, 0), Move(850, 860, 790), Move(862, 872, 825), Move(875, 900, 860)]
EDITED = [*OLD[:790], *OLD[850:860], *NEW[:25], *OLD[862:872], *NEW[25:], *OLD[875:]]


def grid_of(moves: list[Move], exact_tokens: int = TOKENS) -> WindowGrid:
    """Return the grid of blocks in the holes between moves and after the last one."""
    ends = [(a.new_end, b.new_start) for a, b in pairwise(moves)]
    holes = tuple((start, end) for start, end in ends if start < end)
    exact = min(moves[0].end, exact_tokens)
    return WindowGrid(exact, (*holes, (moves[-1].new_end, AGENT_TOKENS_MAX)))


@cache
def engine_of(name: str, bits: KvBits = USUAL) -> Engine:
    return fit_engine(build_model(ARCHITECTURES[name]), bits)


@cache
def window_engine(name: str, bits: KvBits) -> Engine:
    """Fit an engine to a model of nothing but one layer with a window."""
    config: dict[str, Any] = ARCHITECTURES["gpt_oss"] if name == "sinks" else _OLMO
    kinds = ["sliding_attention", "full_attention"]
    model = build_model({**config, "num_hidden_layers": 2, "layer_types": kinds})
    model.model.layers, model.model.layer_types = model.model.layers[:1], kinds[:1]
    model.model.ga_idx = 0  # mlx-lm takes the mask from the other layer's cache
    return fit_engine(model, bits)


def computed_cache(engine: Engine, prompt: list[int]) -> ResidentCache:
    cache = engine.new_cache(len(prompt))
    cache.keeps_slid = True
    for at in range(0, len(prompt), 200):
        engine.prefill(cache, prompt[at : at + 200])
    return cache


def fill_holes(engine: Engine, cache: ResidentCache, prompt: list[int]) -> None:
    while cache.ahead:
        at = cache.tokens_count
        engine.prefill(cache, prompt[at : min(at + 20, cache.ahead[0][0])])


@pytest.mark.parametrize("name", ["plain", "sinks"])
def test_edited_cache_of_a_one_window_model_equals_a_computed_one(name: str) -> None:
    """This holds for rows ahead that are shorter or longer than the window."""
    engine = window_engine(name, PLAIN)
    long = [Move(0, 795, 0), Move(810, 820, 795), Move(830, 900, 815)]
    longer = [*OLD[:795], *OLD[810:820], *NEW[:10], *OLD[830:]]
    for moves, prompt in ((MOVES, EDITED), (long, longer)):
        cache = computed_cache(engine, OLD)
        assert cache.window_base == 768
        cache.rearrange(moves, grid_of(moves))
        fill_holes(engine, cache, prompt)
        assert cache.tokens_count == len(prompt)
        want = logits_after(engine, computed_cache(engine, prompt), prompt_of(3))
        assert relative_error(logits_after(engine, cache, prompt_of(3)), want) < ROUNDING
        cache.rewind(len(prompt))
        cache.hold(len(prompt), (), ())  # without shifts, the logits differ
        assert relative_error(logits_after(engine, cache, prompt_of(3)), want) > 1e-3


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("delta", sample([37, -37, 20_000, -100_000], -37, 20_000))
def test_window_layers_rotate_moved_rows_at_their_own_rates(name: str, delta: int) -> None:
    """Compared with rows rotated in float64, for layers of different bases and for sinks."""
    engine = engine_of(name, PLAIN)
    shifts = (Shift(50, 120, delta), Shift(130, 290, delta // 2 + 1))
    ours = logits_after(engine, filled(engine, 300, shifts), prompt_of(3))
    theirs = logits_after(engine, by_hand(filled(engine, 300), shifts), prompt_of(3))
    assert relative_error(ours, theirs) < ROUNDING * 10 + abs(delta) * 2.0**-23
    for layer in range(len(engine.spec.layers)):
        cache = filled(engine, 300, shifts)
        cache.leaves[layer].shifts = ()  # a layer that did not rotate would be noticed
        assert relative_error(logits_after(engine, cache, prompt_of(3)), theirs) > 1e-4


def rows_at(cache: ResidentCache, places: list[int]) -> dict[int, bytes]:
    """Return each token's rows of all window layers."""
    cache.settle()
    return {at: bytes(cache.gather(at, at + 1, CacheGroup.WINDOW)) for at in places}


@pytest.mark.parametrize("name", sample(["gemma3_text", "gpt_oss"], "gpt_oss"))
def test_windows_read_from_disk_equal_windows_moved_in_memory(name: str) -> None:
    engine = engine_of(name)
    source, edited = computed_cache(engine, OLD), computed_cache(engine, OLD)
    edited.rearrange(MOVES, grid_of(MOVES))
    read = engine.new_cache(len(EDITED))
    for row, own in zip(read.rows(), source.rows(), strict=True):
        for move in MOVES:
            row[:, move.new_start : move.new_end] = own[:, move.start : move.end]
    after = Arrangement(TOKENS, (), ()).after(MOVES)
    for (start, end), places in read.windows.place_edited(after, grid_of(MOVES)):
        window_rows = source.rows(CacheGroup.WINDOW)
        for at in range(start, end):
            old = next(at - m.new_start + m.start for m in MOVES if m.new_start <= at < m.new_end)
            for row, own in zip(places, window_rows, strict=True):
                row[:, at - start] = own[:, old - source.window_base]
    read.hold(after.tokens_count, after.ahead, after.shifts, grid_of(MOVES))
    for each in (edited, read):
        fill_holes(engine, each, EDITED)
    assert (edited.tokens_count, edited.shifts) == (read.tokens_count, read.shifts)
    assert edited.window_base == read.window_base
    places = list(range(edited.window_base, edited.tokens_count))
    assert rows_at(edited, places) == rows_at(read, places)
    assert bytes(edited.gather(0, len(EDITED))) == bytes(read.gather(0, len(EDITED)))
    want = logits_after(engine, read, prompt_of(3))
    assert np.array_equal(logits_after(engine, edited, prompt_of(3)), want)


def test_window_rows_computed_in_a_hole_are_copied_before_sliding_away() -> None:
    """In blocks that begin with the hole; rows that were moved are stored elsewhere."""
    engine = engine_of("gemma3_text")
    cache, hole = computed_cache(engine, OLD), prompt_of(300, seed=7)
    cache.slid.clear()
    moves = [Move(0, 800, 0), Move(820, 900, 1_100)]
    prompt = [*OLD[:800], *hole, *OLD[820:]]
    cache.reserve(len(prompt))
    cache.rearrange(moves, grid_of(moves))
    engine.prefill(cache, hole)
    cache.settle()

    assert {start: len(rows) for start, rows in cache.slid.items()} == {
        800: cache.spec.kv_bytes(256, CacheGroup.WINDOW),
        1_056: cache.spec.kv_bytes(44, CacheGroup.WINDOW),
    }
    assert (cache.tokens_count, cache.window_base) == (1_180, 1_180 - WINDOW_TOKENS + 1)
    assert len(prompt) == 1_180


def test_edit_beyond_the_windows_is_refused_in_memory() -> None:
    engine = engine_of("gemma3_text")
    cache = computed_cache(engine, OLD)
    far = [Move(0, 300, 0), Move(310, TOKENS, 305)]
    assert not cache.can_rearrange(far, grid_of(far))
    with pytest.raises(AssertionError, match="windows have slid on"):
        cache.rearrange(far, grid_of(far))
    # Without a hole no row is computed there, so no row attends to earlier ones.
    taken_out = [Move(0, 300, 0), Move(310, TOKENS, 300)]
    assert cache.can_rearrange(taken_out, grid_of(taken_out))
    cache.rearrange(taken_out, grid_of(taken_out))
    assert (cache.tokens_count, cache.ahead) == (TOKENS - 10, ())


@pytest.mark.parametrize("seed", range(3))
def test_windows_after_many_edits_equal_computed_ones(seed: int) -> None:
    """Repeated edits with tokens computed in between equal a full computation."""
    engine, rng = window_engine("plain", PLAIN), random.Random(seed)
    prompt, exact = list(OLD), TOKENS
    cache = computed_cache(engine, prompt)
    for number in range(4):
        count = cache.tokens_count
        cuts = sorted(rng.sample(range(count - 100, count), 4))
        put_in = prompt_of(rng.randint(1, 60), seed=100 * seed + number)
        moves = [Move(0, cuts[0], 0), Move(cuts[1], cuts[2], cuts[0] + len(put_in))]
        moves.append(Move(cuts[3], count, moves[1].new_end))
        moves = [move for move in moves if move.start < move.end]
        prompt = [*prompt[: cuts[0]], *put_in, *prompt[cuts[1] : cuts[2]], *prompt[cuts[3] :]]
        cache.reserve(len(prompt) + 150)
        exact = min(exact, cuts[0])
        cache.rearrange(moves, grid_of(moves, exact))
        fill_holes(engine, cache, prompt)
        engine.prefill(cache, more := prompt_of(150, seed=number))
        prompt += more
    want = logits_after(engine, computed_cache(engine, prompt), prompt_of(3))
    assert relative_error(logits_after(engine, cache, prompt_of(3)), want) < ROUNDING
