"""Limits of a model: its context length, its vocabulary and its tables of positions.

MLX does not check indexes: a read past a table's end returns arbitrary memory, and a write may
change another agent's cache. To find the tables, this module runs a few tokens and records every
lookup.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from transformers import CONFIG_MAPPING

from fabric.errors import FatalError, RejectedError

_TOKENS = (5, 9, 2)  # not consecutive, as positions are
_TRIED_MIN = 64  # the trial's tokens and positions are below


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a model's inputs and logits."""

    vocabulary_size: int  # rows of the embedding or logits, whichever are fewer
    positions_max: int = sys.maxsize  # rows of a table of positions, if the model has one

    def check_triable(self) -> None:
        """Raise FatalError for a model with fewer tokens or positions than the trials use."""
        if min(self.vocabulary_size, self.positions_max) < _TRIED_MIN:
            message = (
                f"the model has {self.vocabulary_size} tokens and {self.positions_max} positions, "
                f"but at least {_TRIED_MIN} of each are needed"
            )
            raise FatalError(message, code="unsupported_model")

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise RejectedError for an id that has no row."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocabulary_size:
            message = f"a token id is not one of the model's {self.vocabulary_size}"
            raise RejectedError(message, code="token_out_of_range")

    def check_positions(self, tokens_count: int) -> None:
        """Raise RejectedError for a context longer than the table of positions."""
        if tokens_count > self.positions_max:
            message = f"the model has {self.positions_max} positions"
            raise RejectedError(message, code="context_length_exceeded")


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Table of a model, with its number of rows and the rows that were read."""

    rows: int
    indexes: list[int]


def read_limits(model: Any) -> ModelLimits:
    """Find the model's tables; raise FatalError if it does not run."""
    try:
        lookups, width = _observe(model, _TOKENS)
        by_token = {x.rows for x in lookups if x.indexes == list(_TOKENS)}
        sizes = {width, *(rows for rows in by_token if rows < width)}
        # A small table may be guarded: other ids are looked up elsewhere.
        fitting = (size for size in sorted(sizes, reverse=True) if _is_held(model, size - 1))
        vocabulary_size = next(fitting, 0)
    except Exception as error:
        message = f"the model does not run ({type(error).__name__}: {error})"
        raise FatalError(message[:300], code="unsupported_model") from error
    positions = [x.rows - x.indexes[0] for x in lookups if _is_run(x.indexes)]
    return ModelLimits(vocabulary_size, min(positions, default=sys.maxsize))


def _is_held(model: Any, token: int) -> bool:
    """Return whether every table has the row of this token."""
    lookups, _ = _observe(model, (token,))
    return all(0 <= index < x.rows for x in lookups for index in x.indexes)


def _is_run(indexes: list[int]) -> bool:
    return len(indexes) == len(_TOKENS) and indexes == list(
        range(indexes[0], indexes[0] + len(_TOKENS))
    )


def _observe(model: Any, tokens: Sequence[int]) -> tuple[list[_Lookup], int]:
    """Return the lookups for `tokens` and the width of the logits, without evaluating them."""
    with _recording(model) as calls:
        logits = model(mx.array([tokens]), cache=make_prompt_cache(model))
    lookups = [_Lookup(rows, indexes.reshape(-1).tolist()) for rows, indexes in calls]
    return lookups, int(logits.shape[-1])


@contextmanager
def _recording(model: nn.Module) -> Iterator[list[tuple[int, mx.array]]]:
    """Record every call of a module with a table on integers."""
    calls: list[tuple[int, mx.array]] = []
    tables = [m for m in model.modules() if isinstance(m.get("weight"), mx.array)]
    kinds = {type(module): _recording_kind(type(module), calls) for module in tables}
    classes = [(module, type(module)) for module in tables]
    try:
        for module, kind in classes:
            module.__class__ = kinds[kind]
        yield calls
    finally:
        for module, kind in classes:
            module.__class__ = kind


def _recording_kind(kind: Any, calls: list[tuple[int, mx.array]]) -> Any:
    def call(self: Any, x: Any, *args: Any, **options: Any) -> Any:
        indexes = x if isinstance(x, mx.array) else mx.array(x)
        if mx.issubdtype(indexes.dtype, mx.integer):
            calls.append((int(self["weight"].shape[0]), indexes))
        return kind.__call__(self, x, *args, **options)

    return type(kind.__name__, (kind,), {"__call__": call})


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
    """Return the context length from a model's config, its family's defaults or its arguments."""
    return next(_find_limits(config, model_args), _DEFAULT_TOKENS)


def _find_limits(config: Mapping[str, Any], model_args: Any) -> Iterator[int]:
    texts = [part for key in _TEXT_KEYS if isinstance(part := config.get(key), Mapping)]
    for part in (*texts, config):
        yield from _read_limits(part)
    for part in (*texts, config):
        yield from _read_limits(_family_defaults(str(part.get("model_type"))))
    for part in (getattr(model_args, "text_config", None), model_args):
        yield from _read_limits(
            part if isinstance(part, Mapping) else getattr(part, "__dict__", {})
        )


def _read_limits(values: Mapping[str, Any]) -> Iterator[int]:
    for key in _KEYS:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value


def _family_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the defaults that a family's configs may omit, if transformers knows them."""
    with suppress(Exception):  # a family that it does not know or cannot build
        return vars(CONFIG_MAPPING[model_type]().get_text_config())
    return {}
