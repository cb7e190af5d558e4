"""Every text model family of mlx-lm as a tiny random model.

A family's arguments are those of its own class, with small sizes, and extra ones where it needs
them. Windows are 32 tokens and indexes keep 32 tokens or two blocks of 16.
"""

import dataclasses
import importlib
import pkgutil
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten

from tests.support.architectures import ARCHITECTURES, WINDOW_TOKENS
from tests.support.tiny_models import VOCABULARY, build_model
from tests.support.zoo_sizes import GEMMA_3N, KIMI_K3, LAYERS, MINIMAX_M3, MORE, MUSE_SPARK, SWA

# By the name of the argument, for all families that have it.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_vocab": VOCABULARY,
    "hidden_size": 128,
    "hidden_dim": 128,
    "d_model": 128,
    "model_dim": 128,
    "n_embd": 128,
    "intermediate_size": 192,
    "ffn_hidden_size": 192,
    "n_inner": 192,
    "dense_intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS,
    "n_layers": LAYERS,
    "n_layer": LAYERS,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "layernorm_epsilon": 1e-6,
    "norm_eps": 1e-6,
    "norm_epsilon": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "sliding_window": WINDOW_TOKENS,
    "sliding_window_size": WINDOW_TOKENS,
    "attention_window_size": WINDOW_TOKENS,
    "window_size": WINDOW_TOKENS,
    "sliding_window_pattern": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "qkv_bias": False,
    "tie_word_embeddings": False,
    # experts
    "moe_intermediate_size": 64,
    "expert_ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    # latents and indexes
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 64,
    "index_n_heads": 4,
    "index_topk": WINDOW_TOKENS,
    # states
    "conv_kernel": 4,
    "conv_L_cache": 3,
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "time_step_rank": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_scaling": None,
}


def _arguments(module: str, kind: str) -> set[str]:
    owner = importlib.import_module(f"mlx_lm.models.{module}")
    return {field.name for field in dataclasses.fields(getattr(owner, kind))}


def _family(module: str, kind: str = "ModelArgs", **more: Any) -> dict[str, Any]:
    parameter_names = _arguments(module, kind)
    sizes = {name: value for name, value in SIZES.items() if name in parameter_names}
    return {"model_type": module, **sizes, **MORE.get(module, {}), **more}


def _wrapped(module: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model_type": module, "vocab_size": VOCABULARY, "text_config": text, **more}


def _wrappers() -> dict[str, dict[str, Any]]:
    """Return the families that take the arguments of another family, or of a part of one."""
    llama_4 = _family(
        "llama4",
        "TextArgs",
        attention_chunk_size=64,
        intermediate_size_mlp=192,
        interleave_moe_layer_step=2,
        num_experts_per_tok=1,
        use_qk_norm=True,
    )
    windowed = _family("llama", layer_types=SWA)
    return {
        "gemma3": _wrapped("gemma3", _family("gemma3_text")),
        "gemma3n": _wrapped("gemma3n", _family("gemma3n", "TextConfig", **GEMMA_3N)),
        "gemma4": _wrapped("gemma4", ARCHITECTURES["gemma4_text"]),
        "kimi_k25": _wrapped("kimi_k25", _family("deepseek_v3")),
        "kimi_k3": _wrapped("kimi_k3", _family("kimi_k3", "TextArgs", **KIMI_K3)),
        "kimi_vl": _wrapped("kimi_vl", _family("deepseek_v3")),
        "lfm2-vl": _wrapped("lfm2-vl", _family("lfm2")),
        "llama4": _wrapped("llama4", llama_4),
        "llama4_text": _family(
            "llama4_text", intermediate_size_mlp=192, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True
        ),
        "minimax_m3_vl": _wrapped(
            "minimax_m3_vl", _family("minimax_m3_vl", "TextArgs", **MINIMAX_M3)
        ),
        "mistral3": _wrapped("mistral3", _family("ministral3")),
        "mistral3_llama": _wrapped("mistral3", windowed),
        "muse_spark": _wrapped("muse_spark", _family("muse_spark", "TextArgs", **MUSE_SPARK)),
        "pixtral": _wrapped("pixtral", windowed),
        "qwen2_vl": _wrapped("qwen2_vl", _family("qwen2")),
        "qwen3_5": ARCHITECTURES["qwen3_5"],
        "qwen3_5_moe": {
            **ARCHITECTURES["qwen3_5"],
            "model_type": "qwen3_5_moe",
            "text_config": {
                **ARCHITECTURES["qwen3_5"]["text_config"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
            },
        },
        "qwen3_vl": _wrapped("qwen3_vl", _family("qwen3")),
        "qwen3_vl_moe": _wrapped("qwen3_vl_moe", _family("qwen3_moe")),
    }


def _variants() -> dict[str, dict[str, Any]]:
    """Return variants of families, where an argument selects another cache or attention."""
    blocks = MORE["nemotron-nas"]["block_configs"]
    linear = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}
    scaled = {"rope_type": "dynamic", "factor": 2.0}
    return {
        "nemotron-nas_linear": _family(
            "nemotron-nas", block_configs=[blocks[0], linear, *blocks[2:]]
        ),
        "nemotron-nas_linear_first": _family("nemotron-nas", block_configs=[linear, *blocks[1:]]),
        "gear_softcap": _family("gear", attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        "llama_windowed": _family("llama", layer_types=SWA),
        "llama_dynamic": _family("llama", rope_scaling=scaled, max_position_embeddings=256),
        "gemma2_one_head": _family("gemma2", num_key_value_heads=1),
        "gemma2_plain_heads": _family("gemma2", num_key_value_heads=4),
        "mamba_falcon": _family("mamba", model_type="falcon_mamba"),
        "gpt_oss_wide": _family("gpt_oss", sliding_window=300),
        "gemma3_text_300": _family("gemma3_text", sliding_window=300),
    }


# Families of which no tiny model can be built here.
NOT_RUN = {
    "olmo": "needs the package ai2-olmo, and does not run in mlx-lm with it",
    "bitnet": "its layers are a Metal kernel",
    "prism_hadamard_qwen35": "a packing of qwen3_5's weights, with its caches",
}


def build_family(config: dict[str, Any]) -> Any:
    """Build a tiny model without zeros in parameters that training would have changed.

    Gates, convolutions and heads that start at zero would hide errors of a cache.
    """
    model = build_model(config)
    arrays = tree_flatten(model.parameters())
    zeros = [(name, p) for name, p in arrays if p.size > 1 and not mx.any(p).item()]
    noise = [(name, 0.1 * mx.random.normal(p.shape).astype(p.dtype)) for name, p in zeros]
    model.update(tree_unflatten(noise))
    mx.eval(model.parameters())
    return model


def families() -> list[str]:
    """List the modules of mlx-lm that hold a model."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        if module.name in NOT_RUN:
            continue
        owner = importlib.import_module(f"mlx_lm.models.{module.name}")
        if hasattr(owner, "Model") and hasattr(owner, "ModelArgs"):
            found.append(module.name)
    return sorted(found)


def zoo() -> dict[str, dict[str, Any]]:
    """Return a config for every family, by its module's name, and variants of some."""
    special = {**ARCHITECTURES, **_wrappers(), **_variants()}
    return {name: _family(name) for name in families() if name not in special} | special
