"""Context length of a model, which families spell in many ways, and some not at all."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from transformers import CONFIG_MAPPING

_DEFAULT_TOKENS = 8_192
_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "model_max_length",
    "max_context_length",
    "max_sequence_length",
    "seq_length",
    "sequence_len",
    "block_size",
)
_TEXT_KEYS = ("text_config", "llm_config", "language_config")


def context_tokens(config: Mapping[str, Any], model_args: Any = None) -> int:
    """Read the context length off a model's config, its family's defaults, or its arguments."""
    return next(_found(config, model_args), _DEFAULT_TOKENS)


def _found(config: Mapping[str, Any], model_args: Any) -> Iterator[int]:
    texts = [part for key in _TEXT_KEYS if isinstance(part := config.get(key), Mapping)]
    for part in (*texts, config):
        yield from _named(part)
    for part in (*texts, config):
        yield from _named(_family_defaults(str(part.get("model_type"))))
    for part in (getattr(model_args, "text_config", None), model_args):
        yield from _named(part if isinstance(part, Mapping) else getattr(part, "__dict__", {}))


def _named(values: Mapping[str, Any]) -> Iterator[int]:
    for key in _KEYS:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value


def _family_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the defaults that a family's configs may omit, if transformers knows them."""
    with suppress(Exception):  # a family that it does not know or cannot build
        return vars(CONFIG_MAPPING[model_type]().get_text_config())
    return {}
