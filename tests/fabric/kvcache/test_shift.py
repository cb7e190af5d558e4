"""Shifts agree with a list of every token's distance; some rows cannot move."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.kvcache.arrangement import (
    Shift,
    cut_shifts,
    merge_shifts,
    shift_runs,
    unshiftable_reason,
)
from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from tests.support.layers import attention_layer

TOKENS = 12


@st.composite
def _shifts(draw: st.DrawFn) -> tuple[Shift, ...]:
    far = draw(st.lists(st.integers(-2, 2), max_size=TOKENS))
    return merge_shifts(Shift(at, at + 1, delta) for at, delta in enumerate(far))


def _far(shifts: tuple[Shift, ...], tokens_count: int = TOKENS) -> list[int]:
    return [sum(s.delta for s in shifts if s.start <= at < s.end) for at in range(tokens_count)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 1)), max_size=6))
def test_merged_shifts_are_minimal(lengths: list[tuple[int, int]]) -> None:
    at, shifts = 0, []
    for length, delta in lengths:
        shifts.append(Shift(at, at + length, delta))
        at += length
    found = merge_shifts(shifts)

    assert _far(found, at) == _far(tuple(shifts), at)
    assert all(s.delta and s.start < s.end for s in found)
    pairs = itertools.pairwise(found)
    assert not any((a.end, a.delta) == (b.start, b.delta) for a, b in pairs)


@given(_shifts(), st.integers(0, TOKENS), st.integers(0, TOKENS))
def test_cut_shifts_are_relative_to_the_cut(
    shifts: tuple[Shift, ...], start: int, end: int
) -> None:
    start, end = min(start, end), max(start, end)
    found = cut_shifts(shifts, start, end)

    assert _far(found, end - start) == _far(shifts)[start:end]
    assert all(0 <= s.start < s.end <= end - start for s in found)


@given(_shifts())
def test_runs_cover_every_token_once(shifts: tuple[Shift, ...]) -> None:
    found = list(shift_runs(shifts, TOKENS))

    assert [at for run in found for at in range(run.start, run.end)] == list(range(TOKENS))
    assert [run.delta for run in found for _ in range(run.start, run.end)] == _far(shifts)


FULL = attention_layer(LayerKind.FULL, 2, (8, 8), bits=4, group_size=32, dtype="F32")


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (LayerSpec(LayerKind.RECURRENT), "recurrent layers"),
        (LayerSpec(LayerKind.WINDOW, FULL.slots, window_tokens=8, is_chunked=True), "chunks"),
        (LayerSpec(LayerKind.FULL, FULL.slots, rotations_unknown="who knows"), "who knows"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_one_unshiftable_layer_makes_the_cache_unshiftable(layer: LayerSpec, why: str) -> None:
    assert why in unshiftable_reason(ModelCacheSpec((FULL, layer)))
    window = LayerSpec(LayerKind.WINDOW, FULL.slots, window_tokens=8)
    assert not unshiftable_reason(ModelCacheSpec((FULL, window)))


def test_cache_without_layers_is_unshiftable() -> None:
    assert unshiftable_reason(ModelCacheSpec(()))
