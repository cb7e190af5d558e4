"""Random models of a stated geometry, and caches filled without computing every token.

The output of a model does not matter here, only its work.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache, make_prompt_cache

from fabric.hosting.clock import SystemClock
from fabric.limits import DEVICE_POOL_BYTES
from fabric.settings import KvBits
from fabric.turn.generation import Sampling
from node.mlx import device
from node.mlx.engine import DecodeSlot, Engine
from node.mlx.form_trial import choose_forms
from node.mlx.packed_product import use_forms
from node.mlx.probe.probe import fit_engine
from node.mlx.resident_cache import ResidentCache
from node.store.staging import Place

PATTERN_TOKENS = 64  # tokens that are computed, then repeated up to a cache's length


@dataclass(frozen=True, slots=True)
class Geometry:
    """A llama model's shape."""

    hidden: int
    intermediate: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def as_parameters(self) -> dict[str, int]:
        """Return the shape by name, for a report."""
        return asdict(self)


def config_of(shape: Geometry) -> dict[str, Any]:
    """Return a llama model's configuration."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }


def build_model(shape: Geometry, seed: int = 0) -> Any:
    """Build a llama model with random float32 weights."""
    mx.random.seed(seed)
    config = config_of(shape)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.eval()
    mx.eval(model.parameters())
    return model


def build_engine(model: Any) -> Engine:
    """Build an engine around a model, with pool and forms of products as in a node."""
    device.keep_freed_pages(DEVICE_POOL_BYTES)
    engine = fit_engine(model, KvBits())
    use_forms(choose_forms(engine.spec, model.args.num_attention_heads, SystemClock()))
    return engine


def pattern(vocabulary: int, seed: int = 0) -> list[int]:
    """Return the tokens that a synthetic cache repeats."""
    rng = np.random.default_rng(seed)
    picked: list[int] = rng.integers(0, vocabulary, PATTERN_TOKENS).tolist()
    return picked


def resident_caches(
    engine: Engine, tokens: list[int], lengths: Sequence[int], room_tokens: int
) -> list[ResidentCache]:
    """Return a resident cache of each length [tokens], with room for `room_tokens` more."""
    source = engine.new_cache(len(tokens))
    engine.prefill(source, tokens)
    runs = [place.copy() for place in source.places(0, len(tokens))]
    caches = []
    for count in lengths:
        cache = engine.new_cache(count + room_tokens)
        cache.reserve(count + room_tokens)
        cache.settle()
        _repeat(runs, cache.places(0, count))
        cache.assume(count)
        caches.append(cache)
    return caches


def filled_slots(
    engine: Engine, count: int, tokens_count: int, room_tokens: int
) -> list[DecodeSlot]:
    """Return greedy decode slots behind random caches, each with room for `room_tokens` tokens."""
    greedy = Sampling(max_tokens=room_tokens, ignore_eos=True)
    slots = []
    for seed in range(count):
        cache = engine.new_cache(tokens_count + room_tokens)
        cache.fill(tokens_count, mx.random.key(seed))
        cache.assume(tokens_count)
        slots.append(engine.start(cache, [0] * (tokens_count + 1), greedy, seed))
    return slots


def _repeat(runs: list[Place], into: list[Place]) -> None:
    """Fill each view `[heads, tokens, bytes]` with repetitions of the source's tokens."""
    for run, view in zip(runs, into, strict=True):
        view[:] = run[:, np.arange(view.shape[1]) % run.shape[1]]


def stock_caches(model: Any, tokens: list[int], lengths: Sequence[int]) -> list[list[KVCache]]:
    """Return mlx-lm's full-precision caches of each length [tokens]."""
    source = make_prompt_cache(model)
    model(mx.array([tokens]), cache=source)
    parts = [layer.keys_and_values() for layer in source]
    mx.eval(parts)
    return [[KVCache.from_state(_repeated(part, count)) for part in parts] for count in lengths]


def _repeated(part: Sequence[mx.array], tokens_count: int) -> tuple[mx.array, mx.array, int]:
    times = -(-tokens_count // part[0].shape[2])
    keys, values = (
        mx.contiguous(mx.tile(array, (1, 1, times, 1))[:, :, :tokens_count]) for array in part
    )
    mx.eval(keys, values)
    return keys, values, tokens_count
