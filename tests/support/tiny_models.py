"""Tiny random models and tokenizers in folders that mlx-lm loads offline."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from node.mlx.backend import store_weights_by_columns

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    '{% endfor %}\n</tools> answer with <tool_call>\n{"name": tool_call.name}\n</tool_call>'
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 512  # rows of the model
TOKENS = 316  # of the tokenizer: no other row is ever an input or sampled
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
# A quarter of the attention: for tests of memory management, not of computation.
ONE_LAYER: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer whose merges span word boundaries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    lines = ["the cat sat on the mat and the dog sat on the log ", "größer 東京 naïve café "] * 20
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def name_rows(folder: Path, count: int) -> None:
    """Give each row of a model a text, as rows without one are never sampled.

    No encoding uses these texts.
    """
    path = folder / "tokenizer.json"
    plain = json.loads(path.read_text())
    vocabulary = plain["model"]["vocab"]
    top = max(*vocabulary.values(), *(each["id"] for each in plain["added_tokens"]))
    vocabulary |= {f"\u0120row{row}": row for row in range(top + 1, count)}
    path.write_text(json.dumps(plain))


def build_model(config: dict[str, Any], seed: int = 0) -> Any:
    """Build a model with random float32 weights."""
    mx.random.seed(seed)
    model_class, args_class = _get_classes(dict(config))
    model = model_class(args_class.from_dict(dict(config)))
    as_float = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p  # noqa: E731
    model.update(tree_map(as_float, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    store_weights_by_columns(model)
    return model


def write_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write config, weights and tokenizer; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    name_rows(folder, config.get("text_config", config)["vocab_size"])
    weights = dict(tree_flatten(build_model(config, seed).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    return folder
