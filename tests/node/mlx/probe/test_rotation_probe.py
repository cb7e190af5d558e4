"""The rotated dimensions of each architecture's cache, checked against keys at other positions."""

from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

from fabric.kvcache.rotation import Rotation, UnknownRotation
from node.mlx.probe.rotation_probe import _candidates, _record, read_rotations, rotation_fits
from node.mlx.rotate import rotate
from tests.support.architectures import ARCHITECTURES, LLAMA
from tests.support.rotations import close, moving_dims, still, turned
from tests.support.samples import sample
from tests.support.tiny_models import build_model

ALL = range(64)
K_ALL = {"keys": ALL}
ROPED_LATENT = {"values": ALL}  # a latent cache keeps its rotated part where others keep values
INDEXED = {"values": ALL, "index": ALL}  # of 128 index dimensions
PROPORTIONAL = {"keys": [*range(16), *range(64, 80)]}
# Rotated dimensions by slot of each cache: from the papers and configs, not from the probe.
MOVING: dict[str, list[dict[str, Any]]] = {
    "llama": [K_ALL] * 4,
    "qwen2": [K_ALL] * 4,
    "qwen3": [K_ALL] * 4,
    "glm4_moe": [{"keys": range(32)}] * 4,
    "minimax_m2": [{"keys": range(32)}] * 4,
    "gemma3_text": [K_ALL] * 6,
    "gemma4_text": [*[K_ALL] * 4, PROPORTIONAL, K_ALL],
    "gpt_oss": [K_ALL] * 4,
    "deepseek_v2": [{"keys": range(128, 192)}] * 4,
    "deepseek_v3": [ROPED_LATENT] * 4,
    "kimi_k2": [ROPED_LATENT] * 4,
    "glm4_moe_lite": [ROPED_LATENT] * 4,
    "deepseek_v32": [INDEXED] * 4,
    "glm_moe_dsa": [INDEXED] * 4,
    "qwen3_next": [{}, {}, {}, {"keys": range(16)}],
    "qwen3_5": [{}, {}, {}, {"keys": range(16)}],
    "kimi_linear": [{}] * 4,
    "llama_80": [{"keys": range(80)}] * 4,
    "llama_96": [{"keys": range(96)}] * 4,
    "llama_112": [{"keys": range(112)}] * 4,
}
TOKENS, FROM, DELTA = 6, 5, 90


@cache
def model_of(name: str) -> Any:
    config = ARCHITECTURES[name]
    if name == "gemma3_text":  # as released: global layers turn more slowly than local ones
        config = {**config, "rope_theta": 1e6}
    return build_model(config)


@cache
def rotations_of(name: str) -> Any:
    return by_cache(model_of(name))


def by_cache(model: Any) -> Any:
    """Join the rotations of a list's members, whose slots have different names."""
    found = iter(read_rotations(model))
    sizes = [len(getattr(cache, "caches", "1")) for cache in make_prompt_cache(model)]
    return [tuple(r for _ in range(size) for r in next(found)) for size in sizes]


def stored(layer: Any, native: Any, offset: int) -> dict[str, mx.array]:
    """Run the layer's attention alone on mlx-lm's cache, at position `offset`."""
    leaves = [KVCache() for _ in (native.caches if isinstance(native, CacheList) else [0])]
    for leaf in leaves:
        leaf.offset = offset
    layer_cache = CacheList(*leaves) if isinstance(native, CacheList) else leaves[0]
    mx.random.seed(5)
    norm = layer.input_layernorm.weight
    x = mx.random.normal((1, TOKENS, norm.shape[0]))
    layer.self_attn(x, mx.ones((TOKENS, offset + TOKENS), mx.bool_), layer_cache)
    rows = slice(offset, offset + TOKENS)
    arrays = [array[..., rows, :] for leaf in leaves for array in (leaf.keys, leaf.values)]
    return dict(zip(("keys", "values", "index"), arrays, strict=False))


def test_expected_rotations_cover_every_architecture():
    assert MOVING.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_probe_finds_the_rotated_dimensions(name):
    found = [{r.slot: list(moving_dims(r)) for r in cached} for cached in rotations_of(name)]
    assert found == [{slot: list(dims) for slot, dims in one.items()} for one in MOVING[name]]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rotated_keys_equal_the_models_own_at_other_positions(name):
    model = model_of(name)
    caches = make_prompt_cache(model)
    compared = 0
    for layer, native, found in zip(model.layers, caches, rotations_of(name), strict=False):
        if isinstance(native, ArraysCache):
            continue
        near, far = (stored(layer, native, offset) for offset in (FROM, FROM + DELTA))
        rotation_of = {rotation.slot: rotation for rotation in found}
        for slot, rows in near.items():
            rotation = rotation_of.get(slot)
            assert np.array_equal(still(rows, rotation), still(far[slot], rotation))
            if rotation is not None:
                assert close(rotate(rows, rotation, DELTA), far[slot], 2e-5)
                assert close(rotate(far[slot], rotation, -DELTA), rows, 2e-5)
                assert close(turned(rows, rotation, DELTA), far[slot], 2e-5)
                assert not close(rows, far[slot], 0.1)
            compared += 1
    assert compared


def test_layers_of_one_model_may_rotate_at_different_rates():
    bases = [rotation.base for (rotation,) in rotations_of("gemma3_text")]
    assert bases == [1e4, 1e4, 1e6] * 2


@pytest.mark.parametrize("dtype", sample([mx.float16, mx.bfloat16], mx.bfloat16), ids=str)
@pytest.mark.parametrize(
    "name", sample(["llama", "gemma3_text", "gemma4_text", "qwen3_5"], "llama", "gemma4_text")
)
def test_half_precision_finds_the_same_rotations(name, dtype):
    model = build_model(ARCHITECTURES[name])
    exact = read_rotations(model)
    model.set_dtype(dtype)

    assert read_rotations(model) == exact


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v32", "qwen3_next"])
def test_quantized_weights_find_the_same_rotations(name):
    model = build_model(ARCHITECTURES[name])
    nn.quantize(model, group_size=32, bits=4)

    assert by_cache(model) == rotations_of(name)


# --- wrong rotations -------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "base": {"base": 10_010.0},
    "pairing": {"traditional": True},
    "too few": {"dims": 32},
    "rate": {"scale": 0.5},
    "another place": {"start": 16, "dims": 48},
    "no turn": {"base": None, "frequencies": (0.0,) * 32},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_wrong_rotation_is_not_verified(wrong, dtype):
    model = build_model({**LLAMA, "num_hidden_layers": 1})
    model.set_dtype(dtype)
    rows = {p: _record(model, make_prompt_cache(model), p)[0].keys for p in (0, 37, 1_048_583)}
    (right,) = [rotation for rotation in _candidates(model) if rotation.dims == 64]

    assert rotation_fits(right, rows)
    assert not rotation_fits(None, rows)
    assert not rotation_fits(replace(right, **WRONG[wrong]), rows)


def test_rotation_with_one_wrong_slow_pair_is_not_verified():
    """The last pair turns 0.005 radians in 37 tokens; an error of 1 % shows only far out."""
    model = build_model({**LLAMA, "num_hidden_layers": 1})
    rows = {p: _record(model, make_prompt_cache(model), p)[0].keys for p in (0, 37, 1_048_583)}
    turns = tuple(10_000.0 ** (-d / 64) for d in range(0, 64, 2))
    right = Rotation("keys", 0, 64, traditional=False, base=None, scale=1.0, frequencies=turns)
    assert rotation_fits(right, rows)
    assert not rotation_fits(replace(right, frequencies=(*turns[:-1], turns[-1] * 1.01)), rows)


class Lies(nn.RoPE):
    """A rotation at another rate than it declares."""

    def __call__(self, x, offset=0):
        return mx.fast.rope(x, 64, traditional=False, base=10_100.0, scale=1.0, offset=offset)


class Adds(nn.RoPE):
    """A dependence on the position that is not a rotation."""

    def __call__(self, x, offset=0):
        return x + 0.01 * (offset + mx.arange(x.shape[-2]))[:, None]


class Grows(nn.RoPE):
    """A correct rotation that also lengthens the vectors."""

    def __call__(self, x, offset=0):
        return super().__call__(x, offset) * (1 + 0.001 * offset)


class Breaks(nn.RoPE):
    """A rotation that fails beyond the start."""

    def __call__(self, x, offset=0):
        if offset:
            message = "no table for this position"
            raise IndexError(message)
        return super().__call__(x, offset)


@pytest.mark.parametrize("rope", [Lies, Adds, Grows])
def test_layer_with_an_unexplained_rotation_is_unknown(rope):
    model = build_model(LLAMA)
    model.layers[1].self_attn.rope = rope(64)
    known = Rotation("keys", 0, 64, traditional=False, base=1e4, scale=1.0, frequencies=None)

    first, second, *others = read_rotations(model)

    assert [first, *others] == [(known,)] * 3
    assert isinstance(second, UnknownRotation)
    assert "no rotation of the model explains" in second.reason


def test_length_dependent_rate_is_unknown():
    found = read_rotations(
        build_model({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    )
    assert found == [UnknownRotation("keys: turn at another rate far from the start")] * 4


def test_model_failing_at_other_positions_is_unknown():
    model = build_model(LLAMA)
    model.layers[2].self_attn.rope = Breaks(64)
    found = read_rotations(model)
    assert len(found) == 4
    assert {type(one) for one in found} == {UnknownRotation}
    assert "IndexError: no table" in found[0].reason


def test_absolute_positions_are_unknown():
    config = {"model_type": "gpt2", "n_ctx": 64, "n_positions": 64, "n_embd": 64, "n_head": 2}
    shape = {"n_layer": 2, "layer_norm_epsilon": 1e-5, "vocab_size": 512}
    found = read_rotations(build_model({**config, **shape}))
    assert [type(one) for one in found] == [UnknownRotation] * 2


def test_unobservable_cache_is_unknown():
    class Sealed:
        """A cache that does not expose its contents."""

    model = build_model(LLAMA)
    sealed = lambda: [Sealed(), CacheList(KVCache(), Sealed())]  # noqa: E731
    found = read_rotations(model, lambda: [*make_prompt_cache(model), *sealed()])
    unknown = UnknownRotation("a cache of class Sealed cannot be observed")
    assert found[4:] == [unknown, (), unknown]
    assert all(isinstance(one, tuple) for one in found[:4])


class TwoCaches(nn.Module):
    """A layer that stores rotated keys in both of its caches, and values beside some."""

    def __init__(self, second_fill, writes=1):
        super().__init__()
        self.rope = nn.RoPE(8)
        self.fills, self.writes = (1.0, second_fill), writes

    def __call__(self, tokens, cache):
        keys = mx.random.normal((tokens.shape[0], 1, 1, 8), key=mx.random.key(3))
        for leaf, fill in zip(cache[0].caches, self.fills, strict=True):
            values = mx.full(keys.shape, fill)
            for _ in range(self.writes):
                leaf.update_and_fetch(self.rope(keys, offset=leaf.offset), values)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (TwoCaches(0.0), ["keys", "index"]),
        (TwoCaches(1.0), ["keys", "keys"]),
        (TwoCaches(0.0, writes=2), "a step writes the cache more than once"),
    ],
    ids=["index", "second attention", "written twice"],
)
def test_second_cache_without_values_is_an_index(model, found):
    first, second = read_rotations(model, lambda: [CacheList(KVCache(), KVCache())])
    if isinstance(found, str):
        assert first == second == UnknownRotation(found)
    else:
        assert [rotation.slot for rotation in (*first, *second)] == found


def test_yarn_magnitude_is_not_applied_twice():
    """The module would scale keys by 1.35, but stored keys already include that factor."""
    model = model_of("gpt_oss")
    rope = model.layers[0].self_attn.rope
    ((rotation,), *_) = rotations_of("gpt_oss")
    rows = rope(mx.random.normal((1, 2, 7, 64)), offset=11)
    norm = mx.linalg.norm(rows).item()

    assert rope.mscale > 1.3
    assert mx.linalg.norm(rope(rows, offset=37)).item() == pytest.approx(norm * rope.mscale, 1e-4)
    assert mx.linalg.norm(rotate(rows, rotation, 37)).item() == pytest.approx(norm, 1e-5)
