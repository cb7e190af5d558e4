"""Bytes per cached token of real models' geometries, and the number of agents that a Mac holds.

No weights are needed: a cache's size follows from a layer's shape. For each model, the real
per-layer shapes run in a model of few layers that is tiny otherwise, and its caches are measured;
its spec, repeated to the real number of layers, gives the table.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.utils import _get_classes

from benchmarks.report import Limit, Report, say
from fabric.kvcache.cache_spec import NATIVE, CacheGroup, LayerSpec, ModelCacheSpec, SlotSpec
from fabric.settings import KvBits
from node.mlx.engine import Engine
from node.mlx.probe.probe import fit_engine
from node.mlx.resident_cache import ResidentCache

DESCRIPTION = "bytes per cached token and agents per Mac, computed and measured"

CONTEXTS = (4_096, 8_192, 16_384, 32_768)
GIB = 1 << 30
BUDGET_GIB = 10.2  # the cache budget of the 24 GB Mac of the agent-memory paper
Q4_RATIO = 0.28125
GEMMA_TOKENS, GEMMA_GB_MAX = 32_768, 0.75
_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """One real model's layers, and a config with a few of them."""

    layers: int
    pattern: int  # the repeating layers of the small model
    config: dict[str, Any]


GEOMETRIES: dict[str, Geometry] = {
    "Gemma 3 12B": Geometry(
        48,
        6,
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 1_024,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
        },
    ),
    "GPT-OSS 20B": Geometry(
        24,
        2,
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": 150_000,
            "rope_scaling": None,
        },
    ),
    "Llama 3.1 8B": Geometry(
        32,
        1,
        {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 500_000.0,
        },
    ),
    "Qwen 2.5 14B": Geometry(
        48,
        1,
        {
            "model_type": "qwen2",
            "num_hidden_layers": 1,
            "hidden_size": 5_120,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
        },
    ),
    "DeepSeek-V2-Lite": Geometry(
        27,
        1,
        {
            "model_type": "deepseek_v2",
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 4_096,
            },
        },
    ),
}
QUICK = ("GPT-OSS 20B", "Llama 3.1 8B")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument(
        "--budget-gib", type=float, default=BUDGET_GIB, help="cache memory of a Mac"
    )


def run(arguments: argparse.Namespace) -> Report:
    """Measure every geometry."""
    names = QUICK if arguments.quick else tuple(GEOMETRIES)
    budget_bytes = int(arguments.budget_gib * GIB)
    sizes: dict[str, dict[str, float]] = {}
    capacity: dict[str, dict[str, float]] = {}
    limits: list[Limit] = []
    for name in names:
        say(f"{name}: {GEOMETRIES[name].layers} layers")
        spec, measured = _measure(GEOMETRIES[name])
        sizes[name] = _sizes(spec, measured)
        capacity |= {f"{name} at {count:,}": _capacity(spec, count, budget_bytes)
                     for count in CONTEXTS}  # fmt: skip
        limits += _limits(name, sizes[name])
    if "Gemma 3 12B" in names:
        held = _hot_bytes(half_precision_spec(GEOMETRIES["Gemma 3 12B"]), GEMMA_TOKENS)
        sizes["Gemma 3 12B"]["hot GiB at 32k, measured"] = held / GIB
        statement = "Gemma 3 12B hot at 32,768 tokens, as allocated [GB]"
        limits.append(Limit(statement, held / 1e9, GEMMA_GB_MAX, is_least=False))
    return Report(
        parameters={"budget_gib": arguments.budget_gib, "bits": 4, "group_size": 64},
        figures={"bytes": sizes, "agents": capacity},
        ratios={name: row["Q4/fp16"] for name, row in sizes.items()},
        limits=tuple(limits),
        notes=(
            "scales and numbers count 16 bits, as on a Mac; the small models run in float32 here",
            "'paper' keeps every token in every layer, as a cache without windows does",
        ),
    )


def _measure(geometry: Geometry) -> tuple[ModelCacheSpec, float]:
    """Return the whole model's spec, and the small one's ratio of measured to computed bytes."""
    engine = _engine(geometry)
    count = engine.spec.window_tokens + 600
    before = mx.get_active_memory()
    cache = engine.new_cache(count)
    for start in range(0, count, 256):
        engine.prefill(cache, [7] * min(256, count - start))
    cache.rest()
    allocated = mx.get_active_memory() - before
    expected = _expected_bytes(engine.spec, cache)
    assert cache.size_bytes == expected, "a cache's size differs from its spec"
    return _as_half(_repeated(engine.spec, geometry)), allocated / expected


def _engine(geometry: Geometry) -> Engine:
    config = {**_SMALL, **geometry.config}
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return fit_engine(model, KvBits())


def _expected_bytes(spec: ModelCacheSpec, cache: ResidentCache) -> int:
    """Return the bytes of a cache at rest, in whole capacity steps of 256 tokens."""
    full = -(-cache.tokens_count // 256) * 256
    window = -(-(cache.tokens_count - cache.window_base) // 256) * 256
    return spec.kv_bytes(full) + spec.kv_bytes(window, CacheGroup.WINDOW)


def _repeated(spec: ModelCacheSpec, geometry: Geometry) -> ModelCacheSpec:
    assert len(spec.layers) == geometry.pattern, "layers and caches differ in number"
    return ModelCacheSpec(spec.layers * (geometry.layers // geometry.pattern))


def half_precision_spec(geometry: Geometry) -> ModelCacheSpec:
    """Return the whole model's cache as it is on a Mac: 4 bits, 16-bit scales."""
    return _as_half(_repeated(_engine(geometry).spec, geometry))


def _as_half(spec: ModelCacheSpec) -> ModelCacheSpec:
    """Return the spec with 16-bit scales, as models have them on a Mac."""
    return ModelCacheSpec(tuple(
        replace(layer, slots=tuple(replace(slot, dtype="F16") for slot in layer.slots))
        for layer in spec.layers
    ))  # fmt: skip


def _native(layer: LayerSpec) -> LayerSpec:
    def widened(slot: SlotSpec) -> SlotSpec:
        return replace(slot, bits=NATIVE, group_size=0)

    return replace(layer, slots=tuple(map(widened, layer.slots)))


def _per_token(spec: ModelCacheSpec, *, native: bool) -> int:
    """Return the bytes per token of layers that keep every token."""
    layers = (_native(layer) if native else layer for layer in spec.layers)
    tensors = (tensor for layer in layers for tensor in layer.tensors(0, 1))
    return sum(tensor.size_bytes for tensor in tensors)


def _sizes(spec: ModelCacheSpec, measured: float) -> dict[str, float]:
    half, packed = _per_token(spec, native=True), _per_token(spec, native=False)
    hot = spec.resident_bytes(GEMMA_TOKENS)
    return {
        "fp16/token": half,
        "Q4/token": packed,
        "Q4/fp16": packed / half,
        "Q4/token kept at any length": spec.bytes_per_token,
        "window": spec.window_tokens,
        "measured/computed": measured,
        "hot GiB at 32k": hot / GIB,
        "paper GiB at 32k": packed * GEMMA_TOKENS / GIB,
    }


def _capacity(spec: ModelCacheSpec, count: int, budget_bytes: int) -> dict[str, float]:
    """Return how many agents of `count` tokens fit: fp16, Q4 of every token, and ours."""
    half, packed = (_per_token(spec, native=native) * count for native in (True, False))
    return {
        "fp16": budget_bytes // half,
        "Q4 of every token": budget_bytes // packed,
        "here": budget_bytes // spec.resident_bytes(count),
    }


def _limits(name: str, row: dict[str, float]) -> Iterator[Limit]:
    yield Limit(f"{name}: Q4/fp16", row["Q4/fp16"], Q4_RATIO, is_least=False)
    statement = f"{name}: measured by computed bytes"
    yield Limit(statement, row["measured/computed"], 1.02, is_least=False)


def _hot_bytes(spec: ModelCacheSpec, tokens_count: int) -> int:
    """Allocate a whole model's cache of `tokens_count` tokens at rest; return its bytes."""
    before = mx.get_active_memory()
    cache = ResidentCache(spec, tokens_count)
    cache.place_windows(tokens_count)
    cache.assume(tokens_count)
    cache.rest()
    return int(mx.get_active_memory() - before)
