"""Define the prose model: its configuration, its tokenizer, its first weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.models.prose_text import Document

EOS = "<|endoftext|>"
VOCABULARY = 2048
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def train_tokenizer(documents: Sequence[Document]) -> Tokenizer:
    """Return a byte-level BPE tokenizer made from the training documents alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> np.ndarray:
    """Return the documents as one stream of token ids, each ended by the end token."""
    end = tokenizer.token_to_id(EOS)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([d.text for d in documents]):
        stream += [*encoding.ids, end]
    return np.array(stream, dtype=np.int32)


def new_model(seed: int) -> llama.Model:
    """Return the untrained model, residual branches scaled down by depth."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    scale = 1 / math.sqrt(2 * CONFIG["num_hidden_layers"])
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight = linear.weight * scale
    mx.eval(model.parameters())
    return model
