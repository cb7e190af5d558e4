"""Measure the prose model: perplexity with full and quantized KV, by position, and samples."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm import stream_generate
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.sample_utils import make_sampler
from tokenizers import Tokenizer

WINDOW = 1024
PROMPTS = ("This module provides", "Return True if the")
# What attention reads, from a window's first token on: None is full precision.
KV_KINDS: dict[str, dict[str, int] | None] = {
    "full": None,
    "q8_g64": {"bits": 8, "group_size": 64},
    "q4_g32": {"bits": 4, "group_size": 32},
    "q4_g64": {"bits": 4, "group_size": 64},
}
POSITIONS = (0, 32, 128, 256, 512, 1024)
TAIL = 256
CONTEXTS = (32, 128, 256, 512, 768)
# A passage of so many tokens comes twice, with other text of so many tokens in between.
PASSAGE = 128
GAPS = (0, 200, 700)


def windows(stream: np.ndarray, length: int = WINDOW, count: int | None = None) -> np.ndarray:
    """Return the whole windows of a stream; each predicts ``length`` tokens, none twice."""
    whole = (len(stream) - 1) // length
    chosen = range(whole if count is None else min(count, whole))
    return np.stack([stream[i * length : (i + 1) * length + 1] for i in chosen])


def new_cache(model: Any, kind: str) -> list[QuantizedKVCache] | None:
    """Return an empty cache of a kind of ``KV_KINDS``, or None for full precision."""
    quantized = KV_KINDS[kind]
    return None if quantized is None else [QuantizedKVCache(**quantized) for _ in model.layers]


def token_losses(model: Any, chosen: np.ndarray, kind: str = "full") -> np.ndarray:
    """Return the loss in nats of every predicted token, shape (windows, length)."""
    rows = []
    for window in chosen:
        ids = mx.array(window)[None]
        logits = model(ids[:, :-1], cache=new_cache(model, kind))
        rows.append(np.array(nn.losses.cross_entropy(logits, ids[:, 1:]))[0])
    return np.stack(rows)


def byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Return how many bytes of text each token id stands for; the end token stands for none."""
    table = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    special = tokenizer.get_added_tokens_decoder()
    for token, index in tokenizer.get_vocab().items():
        # In the byte-level alphabet one character is one byte.
        table[index] = 0 if index in special else len(token)
    return table


def summary(losses: np.ndarray, chosen: np.ndarray, lengths: np.ndarray) -> dict[str, float]:
    """Return perplexity per token and bits per byte of the predicted tokens."""
    text_bytes = int(lengths[chosen[:, 1:]].sum())
    return {
        "perplexity": round(math.exp(losses.mean()), 3),
        "bits_per_byte": round(float(losses.sum()) / math.log(2) / text_bytes, 4),
    }


def unigram_perplexity(chosen: np.ndarray) -> float:
    """Return the perplexity of the best unigram model there can be for just these tokens."""
    counts = np.array(list(Counter(chosen[:, 1:].ravel().tolist()).values()), dtype=np.float64)
    shares = counts / counts.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def by_position(losses: np.ndarray) -> dict[str, float]:
    """Return the perplexity by place in the window; compare caches, not places, with it."""
    spans = itertools.pairwise(POSITIONS)
    return {
        f"{a}-{b - 1}": round(math.exp(losses[:, a:b].mean()), 3)
        for a, b in spans
        if b <= losses.shape[1]
    }


def by_context(model: Any, chosen: np.ndarray) -> dict[str, float]:
    """Return the perplexity of each window's last tokens when fewer before them are given."""
    result = {}
    for context in CONTEXTS:
        # The first token fed is predicted by none, hence one more.
        losses = token_losses(model, chosen[:, -(TAIL + context + 1) :])
        result[str(context)] = round(math.exp(losses[:, -TAIL:].mean()), 3)
    return result


def second_reading(model: Any, stream: np.ndarray, kind: str) -> dict[str, float]:
    """Return the perplexity of unseen passages read the first time and again after each gap."""
    starts = np.linspace(0, len(stream) - 8 * WINDOW, 16).astype(int)
    result = {}
    for gap in GAPS:
        rows = []
        for start in starts:
            passage = stream[start : start + PASSAGE]
            other = stream[start + 4 * WINDOW :][:gap]
            rows.append(np.concatenate([passage, other, passage]))
        losses = token_losses(model, np.stack(rows), kind)
        # A few tokens have to be read before one can know what is being repeated.
        result["first"] = round(math.exp(losses[:, 8 : PASSAGE - 1].mean()), 3)
        result[f"gap_{gap}"] = round(math.exp(losses[:, PASSAGE + gap + 8 - 1 :].mean()), 3)
    return result


def training_sample(stream: np.ndarray, count: int) -> np.ndarray:
    """Return ``count`` windows spread evenly over the training stream."""
    every = windows(stream)
    chosen: np.ndarray = every[np.linspace(0, len(every) - 1, count).astype(int)]
    return chosen


def figures(
    model: Any, tokenizer: Tokenizer, held_out: np.ndarray, training: np.ndarray
) -> dict[str, Any]:
    """Return every figure of the model card on windows of 1,024 tokens."""
    lengths = byte_lengths(tokenizer)
    chosen = windows(held_out)
    losses = {kind: token_losses(model, chosen, kind) for kind in KV_KINDS}
    seen = training_sample(training, len(chosen))
    return {
        "window": WINDOW,
        "windows": len(chosen),
        "held_out": {kind: summary(loss, chosen, lengths) for kind, loss in losses.items()},
        "held_out_by_position": {kind: by_position(losses[kind]) for kind in ("full", "q4_g64")},
        "held_out_by_context": by_context(model, chosen),
        "second_reading": {
            kind: second_reading(model, held_out, kind) for kind in ("full", "q4_g64")
        },
        "train": summary(token_losses(model, seen), seen, lengths),
        "unigram_perplexity": round(unigram_perplexity(chosen), 1),
    }


def continuation(model: Any, tokenizer: Any, prompt: str, tokens: int, **options: Any) -> str:
    """Return the prompt and what follows, decoded as one text; greedy without a sampler."""
    ids = tokenizer.encode(prompt)
    steps = stream_generate(model, tokenizer, ids, max_tokens=tokens, **options)
    # Decoded alone, the first new token would lose its leading space.
    text: str = tokenizer.decode([*ids, *(step.token for step in steps)])
    return text


def samples(model: Any, tokenizer: Any, prompts: Sequence[str] = PROMPTS) -> list[dict[str, str]]:
    """Return continuations, greedy and drawn with a fixed seed."""
    result = []
    for prompt in prompts:
        greedy = continuation(model, tokenizer, prompt, 60)
        mx.random.seed(0)
        sampler = make_sampler(temp=0.7, top_p=0.95)
        drawn = continuation(model, tokenizer, prompt, 60, sampler=sampler)
        result.append({"prompt": prompt, "greedy": greedy, "drawn": drawn})
    return result
