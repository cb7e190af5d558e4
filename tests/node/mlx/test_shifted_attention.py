"""Attention to moved rows equals attention to rows rotated by hand in float64."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from fabric.kvcache.arrangement import Shift, merge_shifts
from fabric.kvcache.cache_spec import LayerKind, ModelCacheSpec
from fabric.kvcache.rotation import Rotation
from fabric.settings import KvBits
from node.mlx import attention, packed_attention, packed_product, rotate
from node.mlx.attention import LastTokens, Rows, attend
from node.mlx.engine import Batching, Engine
from node.mlx.packed_product import (
    PACKED_QUERIES_MAX,
    Forms,
    ValuesForm,
    chosen_forms,
    use_forms,
)
from node.mlx.resident_cache import ResidentCache
from node.mlx.token_store import Packed, dense
from tests.support.cache_paths import logits_after, prompt_of
from tests.support.layers import attention_layer
from tests.support.rotations import turned
from tests.support.samples import sample
from tests.support.shiftable import PLAIN, SHIFTABLE, USUAL, engine_of
from tests.support.shifted_caches import ROUNDING, by_hand, filled, relative_error

TOKENS = 300
FAR = (37, -37, 1_000, -20_000, 100_000, -100_000)
EVERY = pytest.mark.parametrize(
    "name",
    sample(SHIFTABLE, "llama3", "some_dims", "expanded", "latent", "indexed"),
)
LAYERED = pytest.mark.parametrize("name", sample(SHIFTABLE, "yarn", "some_layers", "latent"))
IN_BATCHES = pytest.mark.parametrize(
    "name", sample(SHIFTABLE, "llama3", "padded_width", "grouped", "latent", "indexed")
)
EPSILON = 2.0**-23


def two_shifts(delta: int) -> tuple[Shift, ...]:
    """Move two runs by different distances, leaving rows before, between and after them."""
    return (Shift(50, 120, delta), Shift(130, 250, delta // 2 + 1))


def tolerance(delta: int) -> float:
    """Return the tolerance for angles rounded to float32."""
    return ROUNDING + abs(delta) * EPSILON / 8


def decode(engine: Engine, cache: ResidentCache) -> NDArray[np.float32]:
    return logits_after(engine, cache, [3, 9, 12])


def prefill(engine: Engine, cache: ResidentCache) -> NDArray[np.float32]:
    return np.array(engine._extend(cache, prompt_of(2 * PACKED_QUERIES_MAX))[0])


def prefill_packed(engine: Engine, cache: ResidentCache) -> NDArray[np.float32]:
    return np.array(engine._extend(cache, prompt_of(PACKED_QUERIES_MAX))[0])


STEPS = pytest.mark.parametrize("step", [decode, prefill, prefill_packed])
Step = Callable[[Engine, ResidentCache], NDArray[np.float32]]


@EVERY
@pytest.mark.parametrize("bits", [USUAL, PLAIN], ids=["quantized", "plain"])
@pytest.mark.parametrize("delta", sample(FAR, 37, -20_000))
@STEPS
def test_attention_to_moved_rows_equals_rows_rotated_by_hand(
    name: str, bits: KvBits, delta: int, step: Step
) -> None:
    """In one layer, so that no later layer's codes amplify the rounding."""
    engine, shifts = engine_of(name, bits, layers_count=1), two_shifts(delta)
    ours = step(engine, filled(engine, TOKENS, shifts))
    theirs = step(engine, by_hand(filled(engine, TOKENS), shifts))

    if name.startswith("indexed"):  # of two tokens that score alike, rounding chooses
        rows = np.abs(ours - theirs).max(axis=-1)
        assert np.median(rows) <= tolerance(delta) * np.abs(theirs).max()
    else:
        assert relative_error(ours, theirs) <= tolerance(delta)
    if name != "no_layer":
        assert relative_error(step(engine, filled(engine, TOKENS)), theirs) > 20 * tolerance(delta)


@LAYERED
@STEPS
def test_every_layer_rotates_moved_rows(name: str, step: Step) -> None:
    engine, shifts = engine_of(name), two_shifts(-37)
    ours = step(engine, filled(engine, TOKENS, shifts))
    theirs = step(engine, by_hand(filled(engine, TOKENS), shifts))

    assert relative_error(ours, theirs) < 2e-3
    for layer in [at for at, layer in enumerate(engine.spec.layers) if layer.rotations]:
        cache = filled(engine, TOKENS, shifts)
        cache.leaves[layer].shifts = ()  # a layer that did not would be noticed
        assert relative_error(step(engine, cache), theirs) > 5e-3


@IN_BATCHES
def test_batched_attention_to_moved_rows_equals_alone(name: str) -> None:
    """This holds beside sequences of other lengths and without moved rows."""
    engine = engine_of(name)

    def caches() -> list[ResidentCache]:
        return [
            filled(engine, TOKENS, two_shifts(-37), seed=1),
            filled(engine, 260, seed=2),
            filled(engine, 280, (Shift(0, 280, 11),), seed=3),
        ]

    tokens = [mx.array([token], mx.uint32) for token in (3, 9, 12)]
    pairs = zip(caches(), tokens, strict=True)
    alone = [np.array(engine.feed([cache], [token])) for cache, token in pairs]
    together = np.array(engine.feed(caches(), tokens))

    assert engine.batching is not Batching.ALONE
    for row, want in zip(together, alone, strict=True):
        assert relative_error(row, want[0]) < 1e-4


@pytest.mark.parametrize("delta", [37, -20_000])
def test_unpacked_products_rotate_moved_rows(monkeypatch: pytest.MonkeyPatch, delta: int) -> None:
    engine = engine_of("llama3", USUAL, layers_count=1)
    shifts = (Shift(50, 700, delta), Shift(720, 1_400, delta // 2 + 1))
    forms = Forms(ValuesForm.UNPACKED, 1, softmax_by_powers=True)
    monkeypatch.setattr(packed_attention, "chosen_forms", lambda: forms)
    unpacked, product = [], packed_product._unpacked_keys_product

    def multiply(queries: mx.array, keys: Packed) -> mx.array:
        unpacked.append(keys.codes.shape[2])
        return product(queries, keys)

    monkeypatch.setattr(packed_product, "_unpacked_keys_product", multiply)
    ours = decode(engine, filled(engine, 1_500, shifts))

    assert {650, 680} <= set(unpacked), "each run of moved rows is multiplied separately"
    theirs = decode(engine, by_hand(filled(engine, 1_500), shifts))
    assert relative_error(ours, theirs) <= tolerance(delta)
    assert relative_error(decode(engine, filled(engine, 1_500)), theirs) > 20 * tolerance(delta)


@EVERY
@pytest.mark.parametrize("bits", [USUAL, PLAIN], ids=["quantized", "plain"])
def test_blocks_of_attention_rotate_moved_rows(name: str, bits: KvBits) -> None:
    engine, shifts = engine_of(name, bits, layers_count=1), (Shift(50, 700, -37),)
    forms, before = Forms(ValuesForm.UNPACKED, 1, softmax_by_powers=True), chosen_forms()
    theirs = prefill(engine, by_hand(filled(engine, 900), shifts))
    try:
        use_forms(forms)
        ours = prefill(engine, filled(engine, 900, shifts))
        unmoved = prefill(engine, filled(engine, 900))
    finally:
        use_forms(before)

    error, unmoved_error = (
        np.median(np.abs(each - theirs).max(axis=-1)) / np.abs(theirs).max()
        for each in (ours, unmoved)
    )
    assert error <= tolerance(-37)
    assert name == "no_layer" or unmoved_error > 20 * tolerance(-37)


def test_every_batching_mode_is_covered() -> None:
    ways = {engine_of(name).batching for name in ("llama3", "latent", "grouped")}
    assert ways == {Batching.RAGGED, Batching.PADDED, Batching.GROUPED}


@contextmanager
def packed_calls() -> Iterator[list[mx.array]]:
    with attention.comparing() as differences:
        yield differences
    assert all(difference.item() < ROUNDING for difference in differences)


@IN_BATCHES
def test_moved_rows_keep_packed_attention(name: str) -> None:
    engine, calls = engine_of(name), []
    for shifts in ((), two_shifts(-37)):
        with packed_calls() as differences:
            decode(engine, filled(engine, TOKENS, shifts))
        calls.append(len(differences))

    assert calls[0] == calls[1] == (3 * len(engine.spec.layers) if engine.packed else 0)


TURN = Rotation("keys", 0, 32, traditional=False, base=1e4, scale=1.0, frequencies=None)
LAYER = replace(
    attention_layer(LayerKind.FULL, 2, (64, 64), bits=4, group_size=32, dtype="F32"),
    rotations=(TURN,),
)


def fetched(cache: ResidentCache, layer: int = 0) -> list[Packed]:
    return cache.leaves[layer].fetch(0, cache.tokens_count)


def filled_cache(*layers: Rotation, shifts: tuple[Shift, ...] = ()) -> ResidentCache:
    spec = ModelCacheSpec(tuple(replace(LAYER, rotations=(turn,)) for turn in layers))
    cache = ResidentCache(spec, TOKENS)
    cache.fill(TOKENS, mx.random.key(1))
    cache.hold(TOKENS, (), shifts)
    return cache


def test_layers_rotate_at_their_own_rates() -> None:
    """In some models the layers' bases differ."""
    bases = (1e4, 1e6, 1e2)
    turns = [replace(TURN, base=base) for base in bases]
    cache, still = (filled_cache(*turns, shifts=shifts) for shifts in (two_shifts(200), ()))
    deltas = [
        sum(s.delta for s in two_shifts(200) if s.start <= at < s.end) for at in range(TOKENS)
    ]

    for layer, turn in enumerate(turns):
        ours, plain = (dense(fetched(c, layer)[0]) for c in (cache, still))
        assert np.allclose(np.array(ours), turned(plain, turn, deltas), atol=1e-4)
        assert not np.allclose(np.array(ours), np.array(plain), atol=1e-2)


@pytest.mark.parametrize("count", [1, 49, 50, 60, 130, 170, 175, 250, 251, 300, 999])
def test_masked_last_tokens_are_rotated_too(count: int) -> None:
    """Rows of a ragged batch are cut from the left, and their moved runs with them."""
    keys, values = fetched(filled_cache(TURN, shifts=two_shifts(200)))
    queries = mx.random.normal((1, 8, 1, 64))
    ours = attend(queries, Rows([keys]), Rows([values]), None, 0.125, LastTokens(count))
    plain = (array[:, :, -count:] for array in (keys.dense(), values.dense()))
    theirs = mx.fast.scaled_dot_product_attention(queries, *plain, scale=0.125)

    assert np.allclose(np.array(ours), np.array(theirs), atol=1e-5)


def test_unmoved_rows_are_fetched_without_rotation() -> None:
    """Unmoved rows carry no shifts and need no computation."""
    keys, values = fetched(filled_cache(TURN))
    moved, _ = fetched(filled_cache(TURN, shifts=two_shifts(200)))

    assert keys.moved_rows is values.moved_rows is None
    assert moved.moved_rows is not None
    assert all(mx.array_equal(a, b) for a, b in zip(keys[:3], moved[:3], strict=True))


def test_stored_bytes_of_moved_rows_are_unrotated() -> None:
    cache, still = filled_cache(TURN, shifts=two_shifts(200)), filled_cache(TURN)

    assert bytes(cache.gather(0, TOKENS)) == bytes(still.gather(0, TOKENS))


def test_rotated_values_are_never_packed() -> None:
    """Packed attention turns queries, which helps keys alone."""
    both = (TURN, replace(TURN, slot="values"))
    cache = ResidentCache(ModelCacheSpec((replace(LAYER, rotations=both),)), 8)
    cache.fill(8, mx.random.key(1))
    plain = mx.zeros((1, 2, 1, 64))
    for shifts, is_packed in (((), True), ((Shift(2, 4, 5),), False)):
        cache.hold(6, (), shifts)
        found = cache.leaves[0].update_and_fetch(plain, plain)
        assert [isinstance(rows, Packed) for rows in found] == [is_packed] * 2


def _scattered(name: str, count: int, *, is_tail_moved: bool) -> tuple[Shift, ...]:
    """Move many short runs by distances of their own, some again by the same, some not at all."""
    drawn = random.Random(f"{name}{count}")
    at, found = 5, []
    for number in range(count):
        size = drawn.randint(1, 40)
        found.append(Shift(at, at + size, drawn.choice((-1, 1)) * (1 + number % (count - 3))))
        at += size + drawn.choice((0, 0, 3))
    return merge_shifts(found if is_tail_moved else [s for s in found if s.end < at - 60])


@pytest.mark.parametrize("name", sample(SHIFTABLE, "llama3", "some_dims", "expanded", "latent"))
@pytest.mark.parametrize("is_tail_moved", [True, False])
def test_combined_product_over_many_runs_equals_separate_products(
    name: str, is_tail_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(name, layers_count=2)
    many = max(packed_attention.TILED_RUNS_MIN, rotate.ROWWISE_RUNS_MIN)
    shifts = _scattered(name, many + 20, is_tail_moved=is_tail_moved)
    count = shifts[-1].end + (0 if is_tail_moved else 70)
    assert len(shifts) > many
    together = decode(engine, filled(engine, count, shifts))
    monkeypatch.setattr(packed_attention, "TILED_RUNS_MIN", len(shifts) + 1)
    monkeypatch.setattr(rotate, "ROWWISE_RUNS_MIN", len(shifts) + 1)
    apart = decode(engine, filled(engine, count, shifts))
    assert relative_error(together, apart) <= ROUNDING
    if name != "no_layer":
        assert relative_error(decode(engine, filled(engine, count)), apart) > 20 * ROUNDING
