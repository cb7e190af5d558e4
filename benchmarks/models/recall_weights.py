"""Construct the weights of the recall model: a llama that repeats what it has read.

Every word-like token has a code of 16 signs. Layers 0 to 3 gather, at every position, the codes of
the seven tokens before it; layer 4 looks for the earlier position whose seven codes agree best with
the last seven tokens and votes for the token that stood there. Nothing is trained.

Distances are measured by rotary phase on the fast dimensions; codes are compared on the slow ones,
which hold still over the whole context. Where an answer begins, the template's own tokens are
skipped, so that the question's last words count as the last tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.models import recall_layers
from benchmarks.models.recall_layout import (
    ASSISTANT,
    BITS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    LINE,
    LOGIT,
    MLP,
    ONE,
    ONE_SIZE,
    OUT,
    OWN,
    POSITIONS,
    QUIET,
    REPLY,
    RMS,
    ROLE,
    STOP,
    THETA,
    Array,
    Kinds,
)


def codes(count: int, seed: int) -> Array:
    """Return ``count`` different words of the extended Hamming code, as signs.

    Of its 2,048 words any two differ in at least four of the 16 places.
    """
    words = [
        word
        for word in range(1, 2**BITS - 1)
        if word.bit_count() % 2 == 0
        and not np.bitwise_xor.reduce([place for place in range(BITS) if word >> place & 1])
    ]
    chosen = np.random.default_rng(seed).permutation(np.array(words))[:count]
    # The places that carry information come first: twelve of them tell any two words apart.
    order = [place for place in range(BITS) if place.bit_count() != 1][::-1]
    order += [place for place in range(BITS) if place.bit_count() == 1]
    return np.where(chosen[:, None] >> np.array(order) & 1, 1.0, -1.0)


def _embedding(table: Array, like: list[int], kinds: Kinds) -> Array:
    """Return the embedding, which is the unembedding too."""
    rows = np.zeros((len(table), HIDDEN))
    rows[:, OWN], rows[:, OUT] = table[like], table
    rows[:, ONE] = ONE_SIZE
    quiet = [*kinds.roles, *kinds.stops]
    replies = [kinds.unknown, kinds.noted]
    # No words: nothing continues from them, and across them nothing is compared.
    rows[[kinds.assistant, kinds.line, *quiet, *replies], OWN] = 0
    for ids, flag in (
        ([kinds.assistant], ASSISTANT),
        (quiet, QUIET),
        (kinds.stops, STOP),
        (kinds.roles, ROLE),
        ([kinds.line], LINE),
        (replies, REPLY),
    ):
        rows[ids, flag] = 1
    return rows


def config(vocabulary: int, eos: int, pad: int) -> dict[str, object]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "max_position_embeddings": POSITIONS,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def construct(like: list[int], kinds: Kinds, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the weights under the names that llama gives them.

    ``like`` holds, for every token, the one that it is taken for when contexts are compared.
    """
    table = codes(len(like), seed)
    full_stop = table[like[kinds.full_stop]]
    undo = np.full(HIDDEN, RMS)
    undo[ONE] = 1 / HIDDEN**0.5
    read = np.zeros(HIDDEN)
    read[OUT] = LOGIT * RMS
    weights = {
        "model.embed_tokens.weight": _embedding(table, like, kinds),
        "model.norm.weight": read,
    }
    for number, layer in enumerate(
        (*recall_layers.gathering(), recall_layers.matching(kinds, table, full_stop))
    ):
        name = f"model.layers.{number}."
        for part in "qkvo":
            weights[f"{name}self_attn.{part}_proj.weight"] = getattr(layer, part)
        # The MLP of every layer adds nothing.
        weights[f"{name}mlp.gate_proj.weight"] = np.zeros((MLP, HIDDEN))
        weights[f"{name}mlp.up_proj.weight"] = np.zeros((MLP, HIDDEN))
        weights[f"{name}mlp.down_proj.weight"] = np.zeros((HIDDEN, MLP))
        weights[f"{name}input_layernorm.weight"] = undo
        weights[f"{name}post_attention_layernorm.weight"] = np.ones(HIDDEN)
    return {name: np.ascontiguousarray(w, dtype=np.float32) for name, w in weights.items()}
