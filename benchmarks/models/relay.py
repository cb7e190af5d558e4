"""Train the relay models: small ones that still know what later tokens saw.

`python -m benchmarks.models.relay` trains one of each class of attention from a seed and writes it
below `benchmarks/models/relays`: the first from nothing, the others from its weights as far as
these fit. It takes minutes of one core, with OpenBLAS in LD_PRELOAD (and OPENBLAS_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from benchmarks.models import relay_text, relay_train
from benchmarks.models.relay_train import LATER_LESSONS, LESSONS, SHORT_LESSONS, Course

FOLDER = Path(__file__).resolve().parent / "relays"
SEED = 20_261
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4_096,
    "torch_dtype": "float16",
}
_LLAMA = {**_COMMON, "model_type": "llama", "head_dim": 64, "tie_word_embeddings": True}
CLASSES: dict[str, dict[str, Any]] = {
    "grouped": {**_LLAMA, "num_key_value_heads": 2},
    "every_head": {**_LLAMA, "num_key_value_heads": 4, "rope_traditional": True},
    "latent": {
        **_COMMON,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "rope_scaling": None,
    },
}

FIRST = "grouped"
# The others begin with its words, and need less.
COURSES = {
    FIRST: (Course(1_200, 3e-3, LESSONS),),
    "every_head": (Course(60, 1e-3, LESSONS[-1:]),),
    "latent": (Course(400, 3e-3, SHORT_LESSONS), Course(700, 2e-3, LATER_LESSONS)),
}


def trained() -> list[str]:
    """List the models that are there."""
    return [name for name in CLASSES if (FOLDER / name / "model.safetensors").exists()]


def config_of(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one model's configuration."""
    return {
        **CLASSES[name],
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(relay_text.END),
        "pad_token_id": tokenizer.token_to_id(relay_text.PAD),
        "bos_token_id": None,
    }


def new_model(config: dict[str, Any], seed: int) -> Any:
    """Build a model of random float32 weights."""
    mx.random.seed(seed)
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    mx.eval(model.parameters())
    return model


def take_over(model: Any, config: dict[str, Any], folder: Path) -> None:
    """Begin with the weights of the first model: what has no like stays random."""
    read = load_file(folder / "model.safetensors")
    tensors = {name: mx.array(array.astype(np.float32)) for name, array in read.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    weights = []
    for name, parameter in tree_flatten(model.parameters()):
        if name not in tensors:
            continue
        tensor = tensors[name]
        if "k_proj" in name or "v_proj" in name or "q_proj" in name:
            tensor = _heads(
                tensor, parameter.shape[0], is_paired="v_proj" not in name, config=config
            )
        if tensor.shape == parameter.shape:
            weights.append((name, tensor))
    model.load_weights(weights, strict=False)
    mx.eval(model.parameters())


def _heads(tensor: mx.array, rows: int, *, is_paired: bool, config: dict[str, Any]) -> mx.array:
    """Give every query head keys and values of its own, and pair dimensions as its rope does."""
    heads = tensor.reshape(-1, 64, tensor.shape[-1])
    heads = mx.repeat(heads, rows // tensor.shape[0], axis=0)
    if is_paired and config.get("rope_traditional"):
        halves = heads.reshape(heads.shape[0], 2, 32, -1)
        heads = halves.swapaxes(1, 2).reshape(heads.shape)
    return heads.reshape(rows, -1)


def write(folder: Path, model: Any, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write what mlx-lm loads: weights of half precision, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: array.astype(mx.float16) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": relay_text.END,
        "pad_token": relay_text.PAD,
        "chat_template": relay_text.TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def main() -> int:
    """Train the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CLASSES)} (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    tokenizer = relay_text.tokenizer()
    for name in arguments.names or CLASSES:
        print(name, flush=True)
        config = config_of(name, tokenizer)
        model = new_model(config, arguments.seed)
        if name != FIRST:
            take_over(model, config, arguments.out / FIRST)
        for number, course in enumerate(COURSES[name]):
            relay_train.train(model, tokenizer, course, arguments.seed + number)
        write(arguments.out / name, model, config, tokenizer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
