"""Tiny models of every cache architecture: the real configs' shapes, with few and small layers.

Weights are random, so they show whether code paths agree bit for bit, not the quality of a model.
Windows are 32 tokens and indexers keep 32, so that 100 tokens are past every limit.
"""

from typing import Any

from tests.support.tiny_models import LLAMA as SMALLEST
from tests.support.tiny_models import ONE_LAYER, VOCABULARY

LLAMA: dict[str, Any] = {
    **SMALLEST,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WINDOW_TOKENS = 32
_YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4_096,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
_LATENT: dict[str, Any] = {
    **LLAMA,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
_INDEXED: dict[str, Any] = {
    **_LATENT,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": WINDOW_TOKENS,
}
_GATED_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "attention_bias": False,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        **LLAMA,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8_192,
        },
    },
    "qwen2": {**LLAMA, "model_type": "qwen2", "hidden_size": 256},
    "qwen3": {**LLAMA, "model_type": "qwen3"},
    "glm4_moe": {
        **LLAMA,
        **_EXPERTS,
        "model_type": "glm4_moe",
        "norm_topk_prob": True,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
    },
    "minimax_m2": {
        **LLAMA,
        "model_type": "minimax_m2",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 64,
        "rotary_dim": 32,
        "rope_scaling": None,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
    },
    "gemma3_text": {
        **LLAMA,
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "sliding_window": WINDOW_TOKENS,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 64,
        "rope_global_base_freq": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        **LLAMA,
        "model_type": "gemma4_text",
        "num_hidden_layers": 10,
        "head_dim": 64,
        "global_head_dim": 128,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 4,
        "hidden_size_per_layer_input": 32,
        "sliding_window": WINDOW_TOKENS,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "gpt_oss": {
        **LLAMA,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW_TOKENS,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4_096,
            "truncate": False,
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v2": {
        **LLAMA,
        **_EXPERTS,
        "model_type": "deepseek_v2",
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "moe_layer_freq": 1,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    # With rope_scaling, transformers' tokenizer loader fails on an unknown model type.
    "kimi_k2": {**_LATENT, "model_type": "kimi_k2", "rope_scaling": None},
    "glm4_moe_lite": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "rope_scaling": None,
        "attention_bias": False,
        "moe_layer_freq": 1,
    },
    "deepseek_v32": {**_INDEXED, "model_type": "deepseek_v32", "rope_scaling": None},
    "glm_moe_dsa": {
        **_INDEXED,
        "model_type": "glm_moe_dsa",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "qwen3_next": {
        **LLAMA,
        **_GATED_DELTA,
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "rope_scaling": None,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "max_position_embeddings": LLAMA["max_position_embeddings"],
        "text_config": {
            **LLAMA,
            **_GATED_DELTA,
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "type": "default",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.25,
            },
        },
    },
    "kimi_linear": {
        **LLAMA,
        "model_type": "kimi_linear",
        "model_max_length": LLAMA["max_position_embeddings"],
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "num_key_value_heads": 4,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "rope_scaling": None,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
    },
}
# Layers that see their own chunk of the context only.
CHUNKED: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": {
        **LLAMA,
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 64,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 256,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_scaling": None,
    },
}
# A cache that can be neither cut nor stored: such a model is served without reuse.
OPAQUE: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v41",
    "head_dim": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW_TOKENS,
}
# Head dimensions that no quantization group divides: stored padded with zeros.
ARCHITECTURES |= {
    f"llama_{width}": {**LLAMA, "hidden_size": 4 * width, "head_dim": width}
    for width in (80, 96, 112)
}
# For tests that depend on the class of cache only.
SMALL_ARCHITECTURES = {**ARCHITECTURES, "llama": ONE_LAYER}
