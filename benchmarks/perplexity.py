"""Measure the perplexity cost of rounding the cache, on the bundled trained model.

Every window starts with an empty cache that holds rounded keys and values from the first token
on. Differences are paired: the same tokens, with and without rounding.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import KVCache
from tokenizers import Tokenizer

from benchmarks.contest import bootstrap_interval
from benchmarks.models import prose_eval, prose_model, prose_text
from benchmarks.report import Limit, Report, say
from node.mlx.loaded_model import LoadedModel, load_model, model_folder

DESCRIPTION = "perplexity with 8- and 4-bit caches on unseen prose, with confidence intervals"

MODEL = "prose"
WINDOWS = 12
QUICK_WINDOWS, QUICK_WINDOW_TOKENS = 2, 128
FULL = "full precision"
OURS = "4-bit g64, the node's cache"
SCALE_BITS = 2 * 16  # a 16-bit scale and bias for each group, as on a Mac
COST_MAX = 0.02
OWN_DIFFERENCE_NATS_MAX = 1e-4
NOTES = (
    (
        "this shows that the cache path costs what 4-bit rounding must cost, and no more; what "
        "that is for another model cannot be told from here: large ones have outlier channels, "
        "this one has 3 layers and was trained on windows of 1,024 tokens"
    ),
    (
        "intervals are over the windows of one text; windows of one document resemble each "
        "other, so the true intervals are somewhat wider"
    ),
)
QUICK_NOTE = "a quick run says nothing about the cost: its windows are few and short"


@dataclass(frozen=True, slots=True)
class Rounding:
    """A quantization of keys and of values: bits and group size."""

    key_bits: int
    value_bits: int
    group_size: int

    @property
    def bits_per_number(self) -> float:
        """Mean stored bits per number of a key or a value, including scales."""
        return (self.key_bits + self.value_bits) / 2 + SCALE_BITS / self.group_size


OWN_ROUNDING = Rounding(4, 4, 64)
ROUNDINGS = {
    "8-bit g64": Rounding(8, 8, 64),
    "4-bit g32": Rounding(4, 4, 32),
    "keys 8, values 4, g64": Rounding(8, 4, 64),
}


BITS = {FULL: 16.0, OURS: OWN_ROUNDING.bits_per_number} | {
    name: rounding.bits_per_number for name, rounding in ROUNDINGS.items()
}


class RoundedCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """A full-precision cache of keys and values that were quantized once.

    Independent of the node's cache: attention sees the same values, without shared code.
    """

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append `[1, kv_heads, n, width]`, rounded, and return all tokens."""
        group = self._rounding.group_size
        return super().update_and_fetch(
            _rounded(keys, self._rounding.key_bits, group),
            _rounded(values, self._rounding.value_bits, group),
        )


def _rounded(vectors: mx.array, bits: int, group_size: int) -> mx.array:
    parts = mx.quantize(vectors, group_size=group_size, bits=bits)
    return mx.dequantize(*parts, group_size=group_size, bits=bits)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument(
        "--windows",
        type=int,
        help=f"windows, spread over the text (default: {WINDOWS}; 0: all); without a BLAS "
        "library in LD_PRELOAD each takes 20 s of CPU time",
    )


def window_losses(model: Any, window: np.ndarray, cache: list[Any] | None) -> np.ndarray:
    """Return the loss in nats of every predicted token of a window `[tokens + 1]`."""
    ids = mx.array(window)[None]
    logits = model(ids[:, :-1], cache=cache)
    losses = np.array(nn.losses.cross_entropy(logits, ids[:, 1:]))[0]
    exact: np.ndarray = losses.astype(np.float64)
    return exact


def cache_makers(loaded: LoadedModel) -> dict[str, Callable[[], list[Any] | None]]:
    """Return a function for every kind of cache that makes an empty one."""
    makers: dict[str, Callable[[], list[Any] | None]] = {
        FULL: lambda: None,
        OURS: lambda: loaded.engine.new_cache(prose_eval.WINDOW).layers,
    }
    return makers | {
        name: partial(rounded_caches, loaded, rounding) for name, rounding in ROUNDINGS.items()
    }


def rounded_caches(loaded: LoadedModel, rounding: Rounding) -> list[Any]:
    """Return an empty cache that rounds, for every layer."""
    return [RoundedCache(rounding) for _ in loaded.engine.model.layers]


def measured(loaded: LoadedModel, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Return the losses `[windows, tokens]` of every kind of cache."""
    makers = cache_makers(loaded)
    rows: dict[str, list[np.ndarray]] = {kind: [] for kind in makers}
    for number, window in enumerate(chosen, 1):
        for kind, make in makers.items():
            rows[kind].append(window_losses(loaded.engine.model, window, make()))
        say(f"window {number} of {len(chosen)}")
    return {kind: np.stack(losses) for kind, losses in rows.items()}


def own_difference(loaded: LoadedModel, window: np.ndarray, ours: np.ndarray) -> float:
    """Return the largest difference of a token's loss [nats] from rounding by other code."""
    other = window_losses(loaded.engine.model, window, rounded_caches(loaded, OWN_ROUNDING))
    return float(np.abs(ours - other).max())


def overall(losses: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return perplexity and what rounding adds to it, with its 95 % interval over windows."""
    table = {}
    for kind, found in losses.items():
        added = (found - losses[FULL]).mean(axis=1)
        low, high = bootstrap_interval(added)
        table[kind] = {
            "bits_per_number": BITS[kind],
            "perplexity": math.exp(found.mean()),
            "added_nats": float(added.mean()),
            "added_percent": 100 * math.expm1(added.mean()),
            "low_percent": 100 * math.expm1(low),
            "high_percent": 100 * math.expm1(high),
        }
    return table


def by_position(losses: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the percentage that rounding adds to perplexity, by place in the window."""
    table: dict[str, dict[str, float]] = {}
    for kind, found in losses.items():
        if kind == FULL:
            continue
        added = found - losses[FULL]
        table[kind] = {
            f"{a}-{b - 1}": 100 * math.expm1(added[:, a:b].mean())
            for a, b in itertools.pairwise(prose_eval.POSITIONS)
            if b <= added.shape[1]
        }
    return table


def windows_of(arguments: argparse.Namespace, stream: np.ndarray) -> np.ndarray:
    """Return windows `[windows, tokens + 1]` spread over the text."""
    length = QUICK_WINDOW_TOKENS if arguments.quick else prose_eval.WINDOW
    every = prose_eval.windows(stream, length)
    count = arguments.windows
    if count is None:
        count = QUICK_WINDOWS if arguments.quick else WINDOWS
    # Not the first ones: the beginning of a text is uniform.
    chosen = np.linspace(0, len(every) - 1, count or len(every)).astype(int)
    picked: np.ndarray = every[np.unique(chosen)]
    return picked


def run(arguments: argparse.Namespace) -> Report:
    """Measure every kind of cache on the same windows."""
    say("reading the held-out text of the installed Python")
    loaded = load_model(MODEL)
    tokenizer = Tokenizer.from_file(str(model_folder(MODEL) / "tokenizer.json"))
    documents = prose_text.held_out_documents()
    chosen = windows_of(arguments, prose_model.encode(tokenizer, documents))
    losses = measured(loaded, chosen)
    totals = overall(losses)
    own = own_difference(loaded, chosen[0], losses[OURS][0])
    parameters = {
        "model": MODEL,
        "windows": len(chosen),
        "window_tokens": chosen.shape[1] - 1,
        "text_digest": prose_text.digest(documents),
    }
    figures = {"cache": totals, "added_percent_by_position": by_position(losses)}
    ratios = {
        f"perplexity, {kind}, over full": totals[kind]["perplexity"] / totals[FULL]["perplexity"]
        for kind in totals
        if kind != FULL
    }
    cost = totals[OURS]["high_percent"] / 100
    notes = (*NOTES, QUICK_NOTE) if arguments.quick else NOTES
    return Report(
        parameters, figures, ratios, limits(own, None if arguments.quick else cost), notes
    )


def limits(own_difference_nats: float, cost: float | None) -> tuple[Limit, ...]:
    """Return the limits; a quick run measures no cost."""
    own = Limit(
        "nats between the node's cache and rounding by other code, worst token of a window",
        own_difference_nats,
        OWN_DIFFERENCE_NATS_MAX,
        is_least=False,
    )
    if cost is None:
        return (own,)
    statement = "share that 4 bits add to perplexity, upper end of the 95 % interval"
    return own, Limit(statement, cost, COST_MAX, is_least=False)
