"""Tiny models with movable rows: every kind of RoPE and layer that allows it."""

from functools import cache
from typing import Any

from fabric.kvcache.cache_spec import NATIVE
from fabric.settings import KvBits
from node.mlx.engine import Engine
from node.mlx.probe.probe import fit_engine
from tests.support.architectures import ARCHITECTURES, LLAMA
from tests.support.tiny_models import build_model

_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8_192}
_LONG = [1.0 + 7 * at / 31 for at in range(32)]
SHIFTABLE: dict[str, dict[str, Any]] = {
    "llama3": ARCHITECTURES["llama"],
    "every_head": {**LLAMA, "num_key_value_heads": 4, "rope_traditional": True},
    "linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": {**LLAMA, "model_type": "qwen3", "rope_scaling": _YARN},  # with a magnitude factor
    "longrope": {
        **LLAMA,
        "model_type": "phi3",
        "hidden_size": 256,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": _LONG},
    },
    "some_dims": ARCHITECTURES["glm4_moe"],
    "some_layers": {**LLAMA, "model_type": "smollm3", "no_rope_layer_interval": 2},
    "no_layer": {**LLAMA, "model_type": "smollm3", "no_rope_layers": [0] * 4},
    "padded_width": ARCHITECTURES["llama_80"],
    "expanded": ARCHITECTURES["deepseek_v2"],  # yarn with a magnitude factor, on the last 64 of 192
    "grouped": {
        **LLAMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 64.0,
    },
    "latent": ARCHITECTURES["deepseek_v3"],
    "indexed": ARCHITECTURES["deepseek_v32"],
    "indexed_otherwise": ARCHITECTURES["glm_moe_dsa"],
}
USUAL, PLAIN = KvBits(), KvBits(NATIVE, NATIVE, NATIVE)


@cache
def engine_of(name: str, bits: KvBits = USUAL, layers_count: int = 4) -> Engine:
    """Fit an engine to a model with `layers_count` layers."""
    return fit_engine(build_model(with_layers(SHIFTABLE[name], layers_count)), bits)


def with_layers(config: dict[str, Any], layers_count: int) -> dict[str, Any]:
    """Return a model's configuration with `layers_count` layers."""
    changed = {**config, "num_hidden_layers": layers_count}
    if "no_rope_layers" in changed:
        changed["no_rope_layers"] = changed["no_rope_layers"][:layers_count]
    return changed
