"""Every text model family of mlx-lm: its caches batched, stored and read back, against mlx-lm's.

`make test` tries one with an index, `make test-all` every one. Weights are
random and float32: these compare paths, never what a model knows.
"""

from collections.abc import Iterator
from functools import cache as remembered
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from fabric.errors import FatalError
from fabric.kvcache.arrangement import Shift, unshiftable_reason
from fabric.kvcache.cache_spec import NATIVE, CacheGroup
from fabric.settings import KvBits
from node.mlx import attention
from node.mlx.engine import Batching, Engine
from node.mlx.probe.probe import fit_engine
from tests.support.cache_paths import extend, logits_after, prefilled, prompt_of, shelf_at
from tests.support.shifted_caches import by_hand, filled
from tests.support.zoo import NOT_RUN, build_family, families, zoo
from tests.support.zoo_kernels import install

install()
ZOO = zoo()
OPAQUE = {"deepseek_v41": "caches of kind LayerCache"}
QUICK = {"minimax_m3_vl"}
# Which of them decode alone, or together at equal lengths only, and why.
ALONE = {
    "gpt_bigcode": "counts positions on the host",
    "llama4": "masks chunks by one position for all",
    "llama_dynamic": "stretches its positions with the length",
}
EQUAL = {
    "afm7": "attends by itself, to one length",
    "minimax_m3_vl": "its index chooses blocks by place in the cache",
    "phi3small": "attends by itself, to one length",
}
# Longer than any window or index of the zoo, with ends on both sides of a block's and a window's.
LENGTHS = ((370, 3, 247), (241, 239, 250), (257, 256, 255))
CUTS = (1, 32, 255, 257, 300, 400)
NATIVE_BITS = KvBits(NATIVE, NATIVE, NATIVE)
EVERY = pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly)
        for name in ZOO
        if name not in OPAQUE
    ],
)


@pytest.fixture(scope="module", autouse=True)
def _not_compiled() -> Iterator[None]:
    """Compiling a kernel for each family takes minutes on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@remembered
def model_of(name: str) -> Any:
    return build_family(ZOO[name])


@remembered
def engine_of(name: str, bits: KvBits = KvBits()) -> Engine:  # noqa: B008 - frozen
    return fit_engine(model_of(name), bits)


def decode_logits(engine: Engine, prompts: list[list[int]], together: bool) -> list[NDArray[Any]]:
    """Feed the prompts' last three tokens, each prompt's own; return their logits."""
    caches = [prefilled(engine, prompt[:-3]) for prompt in prompts]
    rows: list[list[NDArray[Any]]] = [[] for _ in prompts]
    for step in (-3, -2, -1):
        tokens = [mx.array([prompt[step]], mx.uint32) for prompt in prompts]
        if together:
            found = list(np.array(engine.feed(caches, tokens)))
        else:
            pairs = zip(caches, tokens, strict=True)
            found = [np.array(engine.feed([cache], [token]))[0] for cache, token in pairs]
        for row, logits in zip(rows, found, strict=True):
            row.append(logits)
    return [np.stack(row) for row in rows]


def relative_error(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Return the largest difference relative to the largest number, of finite values."""
    assert np.array_equal(np.isfinite(ours), np.isfinite(theirs))
    finite = np.isfinite(theirs)
    return float(np.abs(ours[finite] - theirs[finite]).max() / np.abs(theirs[finite]).max())


def test_zoo_covers_every_family() -> None:
    """Every family of mlx-lm is tested, or listed with a reason."""
    named = {config["model_type"].replace("falcon_mamba", "mamba") for config in ZOO.values()}
    assert set(families()) <= named
    assert not named & NOT_RUN.keys()
    assert QUICK | OPAQUE.keys() | ALONE.keys() | EQUAL.keys() <= ZOO.keys()


@EVERY
def test_batched_equals_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At all lengths, past every window and budget, in every batch."""
    engine = engine_of(name)
    # Sequences that would be decoded alone for their cost are batched here.
    monkeypatch.setattr(engine, "padded_tokens_max", 1 << 30)
    is_alone, is_equal = engine.batching is Batching.ALONE, engine.padded_waste_max == 1.0
    assert is_alone == (name in ALONE)
    assert (is_equal and not is_alone) == (name in EQUAL)
    lengths = LENGTHS if not is_equal else ((370, 370, 370), (33, 33, 33))
    if not is_equal:
        monkeypatch.setattr(engine, "padded_waste_max", 1e9)
    for group in lengths:
        prompts = [prompt_of(count, seed) for seed, count in enumerate(group)]
        alone = decode_logits(engine, prompts, together=False)
        together = decode_logits(engine, prompts, together=True)
        for one, other in zip(together, alone, strict=True):
            assert relative_error(one, other) < 1e-4


@EVERY
def test_restored_cache_equals_undisturbed(name: str, tmp_path: Path) -> None:
    """From disk at any cut, and stored and read again from there: equal bit for bit."""
    engine = engine_of(name)
    for seed, cut in enumerate(CUTS):
        prompt = prompt_of(cut, seed)
        undisturbed = prefilled(engine, prompt)
        with shelf_at(tmp_path / f"{cut}", engine) as shelf:
            saved = shelf.save(undisturbed, prompt)
            restored = engine.new_cache(cut + 64)
            assert shelf.restore(restored, prompt, saved, cut) == cut
            following = prompt_of(20, seed=cut)
            extend(engine, undisturbed, [*prompt, *following])
            extend(engine, restored, [*prompt, *following])
            more = prompt_of(4, seed=cut + 1)
            want = logits_after(engine, undisturbed, more)
            assert np.array_equal(logits_after(engine, restored, more), want)
            whole = [*prompt, *following, *more]
            restored.take_snapshot()
            saved = shelf.save(restored, whole, saved)
            again = engine.new_cache(len(whole) + 64)
            assert shelf.restore(again, whole, saved) == len(whole)
        want = logits_after(engine, undisturbed, more)
        assert np.array_equal(logits_after(engine, again, more), want)


@EVERY
def test_native_caches_compute_the_same_as_mlx_lm(name: str) -> None:
    """Far past every window, in the same chunks, against mlx-lm's own caches."""
    model, engine = model_of(name), engine_of(name, NATIVE_BITS)
    prompt = prompt_of(700)
    native = make_prompt_cache(model)
    ours = engine.new_cache(len(prompt))
    want, got = [], []
    for start in range(0, 690, 115):
        chunk = prompt[start : start + 115]
        model(mx.array([chunk]), cache=native)
        mx.eval([cache.state for cache in native if not cache.empty()])
        engine.prefill(ours, chunk)
    for token in prompt[690:]:
        want.append(np.array(model(mx.array([[token]]), cache=native)[0, -1]))
        got.append(np.array(engine.feed([ours], [mx.array([token], mx.uint32)])[0]))

    assert relative_error(np.stack(got), np.stack(want)) < 3e-4


@EVERY
def test_rewound_cache_equals_undisturbed(name: str) -> None:
    """A cache rewound in memory computes the same as the first time."""
    engine, prompt = engine_of(name), prompt_of(300)
    first = prefilled(engine, prompt[:290])  # the windows begin in the last block
    again = prefilled(engine, prompt[:290])
    extend(engine, again, prompt)
    assert again.can_rewind(290)
    again.rewind(290)
    more = prompt_of(5, seed=8)
    before = logits_after(engine, first, more)
    assert np.array_equal(logits_after(engine, again, more), before)

    # Another cache gives other logits, so the comparison depends on the cache.
    other = prefilled(engine, prompt_of(290, seed=9))
    assert relative_error(logits_after(engine, other, more), before) > 1e-3


@EVERY
def test_moved_rows_equal_rows_rotated_by_hand(name: str) -> None:
    """Unquantized, the final logits are compared; packed, every call of attention."""
    shifts = (Shift(20, 90, -13), Shift(100, 180, 40))
    plain, engine = engine_of(name, NATIVE_BITS), engine_of(name)
    if unshiftable_reason(engine.spec):
        assert any(
            layer.group is not CacheGroup.FULL or layer.rotations_unknown
            for layer in engine.spec.layers
        )
        return
    ours = logits_after(plain, filled(plain, 200, shifts), prompt_of(3))
    theirs = logits_after(plain, by_hand(filled(plain, 200), shifts), prompt_of(3))
    assert relative_error(ours, theirs) < 1e-4
    with attention.comparing() as differences:
        logits_after(engine, filled(engine, 200, shifts), prompt_of(3))
    assert bool(differences) == engine.packed
    assert all(difference.item() < 1e-4 for difference in differences)


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_families_are_refused_with_the_reason(name: str) -> None:
    """Opaque families are refused with a reason, and these are all of them."""
    with pytest.raises(FatalError, match=OPAQUE[name]):
        engine_of(name)
