"""The context length of a model, in every spelling of its config."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from fabric.errors import FatalError
from node.mlx.loaded_model import load_model
from node.mlx.model_limits import context_tokens
from tests.node.mlx.test_model_limits import GPT2, POSITIONS
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import LLAMA, write_model


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"model_type": "llama", "max_position_embeddings": 4_096}, 4_096),
        ({"text_config": {"max_position_embeddings": 40_960}, "model_max_length": 7}, 40_960),
        ({"max_position_embeddings": 4_096, "text_config": {"model_type": "own"}}, 4_096),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, 131_072),
        ({"model_type": "kimi_linear", "model_max_length": 1_048_576}, 1_048_576),
        ({"model_type": "dbrx", "max_seq_len": 32_768}, 32_768),
        ({"model_type": "gpt2", "n_positions": 1_024, "n_ctx": 512}, 1_024),
        ({"model_type": "gptj", "n_positions": 2_048}, 2_048),
        ({"model_type": "openelm", "max_context_length": 2_048}, 2_048),
        ({"model_type": "olmo", "max_sequence_length": 2_048}, 2_048),
        ({"model_type": "qwen", "seq_length": 8_191}, 8_191),
        ({"model_type": "lille-130m", "block_size": 512}, 512),
        ({"model_type": "own", "max_position_embeddings": None}, 8_192),
        ({"model_type": "own", "max_position_embeddings": None, "n_ctx": 700}, 700),
        ({"model_type": "own", "max_position_embeddings": "4096"}, 8_192),
        ({"model_type": "own", "max_position_embeddings": True, "n_ctx": -1}, 8_192),
        ({"model_type": None, "text_config": None}, 8_192),
        ({}, 8_192),
    ],
)
def test_context_length_is_read_from_every_spelling(config: dict[str, Any], want: int) -> None:
    """The text part before the whole, the config before its family's default."""
    assert context_tokens(config) == want


def test_context_length_falls_back_to_model_arguments() -> None:
    """Arguments of the model class are the last source before a default."""
    assert context_tokens({}, SimpleNamespace(max_position_embeddings=2_048)) == 2_048
    nested = SimpleNamespace(text_config={"max_position_embeddings": 4_096})
    assert context_tokens({}, nested) == 4_096


def test_position_table_limits_the_context(tmp_path) -> None:
    """The table's size applies even if the config claims more."""
    folder = write_model(tmp_path / "gpt2", {**GPT2, "max_position_embeddings": 4_096})

    assert load_model(str(folder)).context_tokens_max == POSITIONS
    assert load_model(str(folder), 100).context_tokens_max == 100
    assert load_model(str(folder), 100_000).context_tokens_max == POSITIONS


def test_context_length_of_a_model_with_own_spelling_is_loaded(tmp_path) -> None:
    """Kimi Linear's config has its own name for it."""
    config = {**ARCHITECTURES["kimi_linear"], "model_max_length": 54_321}
    del config["max_position_embeddings"]
    folder = write_model(tmp_path / "kimi", config)
    assert load_model(str(folder)).context_tokens_max == 54_321


def test_model_module_calling_exit_is_a_fatal_error(tmp_path) -> None:
    """OLMo's module calls sys.exit if a package is missing; the node reports an error instead."""
    folder = write_model(tmp_path / "olmo", LLAMA)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "model_type": "olmo"}))
    with pytest.raises(FatalError, match="cannot load olmo"):
        load_model(str(folder))
