"""Properties of answers in a model's own files: where they end, and how they are sampled."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fabric.sampling_defaults import BUILT_IN, model_defaults

_LOG = logging.getLogger("macfabric.node")
_CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
_END: Final = "eos_token_id"
_TEXT_PARTS: Final = ("text_config", "llm_config", "language_config")


def read_end_ids(folder: Path, vocabulary_size: int) -> frozenset[int]:
    """Return every token that a file names as an answer's end.

    mlx-lm lets generation_config.json replace what config.json lists.
    """
    config = _read(folder / _CONFIG)
    parts = [config, *(part for name in _TEXT_PARTS if isinstance(part := config.get(name), dict))]
    named = {token for part in (*parts, _read(folder / _GENERATION)) for token in _end_ids(part)}
    return frozenset(token for token in named if 0 <= token < vocabulary_size)


def read_sampling(folder: Path) -> dict[str, float]:
    """Return the model's own defaults of requests; note in the log what cannot be used."""
    config = _read(folder / _GENERATION)
    defaults = model_defaults(config)
    for name in BUILT_IN:
        if config.get(name) is not None and name not in defaults:
            _LOG.warning("%s: %s has no valid %s; it is ignored", folder.name, _GENERATION, name)
    return defaults


def _end_ids(config: Mapping[str, Any]) -> Iterator[int]:
    ids = config.get(_END)
    for token in ids if isinstance(ids, list) else [ids]:
        if type(token) is int:
            yield token


def _read(path: Path) -> Mapping[str, Any]:
    """Read one of the model's JSON files; return {} for a missing or damaged one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
