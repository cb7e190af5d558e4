"""A random model with a vocabulary of today's size, in a folder that a node loads."""

import json
import random
import string
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks import workload
from benchmarks.workload import Geometry

# SmolLM2-135M's shape: large enough that prompts have a realistic cost.
# Source: its config.json.
SMALL_LLM = Geometry(
    hidden=576,
    intermediate=1536,
    layers=30,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    vocabulary=49_152,
)
END = "<|im_end|>"
CONTEXT_TOKENS = 65_536
WORD_CHARS_MAX = 10
# Calls are JSON behind a mark; prompts list only the names of tools, to stay short.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} by <tool_call>\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}" + END + "\n"
    "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)
_PARTS = ('{"', '":', '",', '"}', "},", ' "', ', "', ": ", '": ')  # as JSON is merged everywhere


def write_model(folder: Path, shape: Geometry) -> Path:
    """Write config, weights and tokenizer; return the folder."""
    folder.mkdir(parents=True)
    weights = dict(tree_flatten(workload.build_model(shape).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    end_id = write_tokenizer(folder, shape.vocabulary)
    config = {
        **workload.config_of(shape),
        "eos_token_id": end_id,
        "max_position_embeddings": CONTEXT_TOKENS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path, count: int) -> int:
    """Write a byte-level BPE tokenizer of `count` tokens; return its end token's id."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))

    for part in _PARTS:
        spelled = part.replace(" ", "Ġ")
        for end in range(1, len(spelled)):
            merge(spelled[:end], spelled[end])
    rng = random.Random(0)
    words = [*string.ascii_letters, "Ġ"]
    while len(vocabulary) < count - 1:
        word = rng.choice(words)
        letter = rng.choice(string.ascii_lowercase)
        if len(word) < WORD_CHARS_MAX and word + letter not in vocabulary:
            merge(word, letter)
            words.append(word + letter)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.token_to_id(END))
