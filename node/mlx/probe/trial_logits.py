"""Logits of short trials, and their comparison."""

from collections.abc import Sequence

import mlx.core as mx

from node.mlx.engine import Engine
from node.mlx.resident_cache import ResidentCache

STEPS = 2  # decoded after a prompt


def prompt_of(tokens_count: int, seed: int = 0) -> list[int]:
    """Return a prompt of small ids, which every model has."""
    return [1 + (7 * at + tokens_count + seed) % 31 for at in range(tokens_count)]


def prefilled(engine: Engine, prompt: list[int]) -> ResidentCache:
    """Return a cache of all of a prompt but its last tokens."""
    cache = engine.new_cache(len(prompt))
    engine.prefill(cache, prompt[:-STEPS])
    return cache


def decoded(
    engine: Engine, caches: list[ResidentCache], prompts: Sequence[list[int]]
) -> list[mx.array]:
    """Feed the prompts' last tokens together; return `[steps, vocabulary]` for each."""
    steps = []
    for step in range(STEPS):
        tokens = [mx.array([prompt[step - STEPS]], mx.uint32) for prompt in prompts]
        steps.append(engine.feed(caches, tokens).astype(mx.float32))
        mx.eval(steps[-1])
    return [mx.stack([rows[index] for rows in steps]) for index in range(len(prompts))]


def alone(engine: Engine, prompts: Sequence[list[int]]) -> list[mx.array]:
    """Return the logits of each prompt computed by itself."""
    return [decoded(engine, [prefilled(engine, p)], [p])[0] for p in prompts]


def agree(ours: Sequence[mx.array], theirs: Sequence[mx.array], tolerance: float) -> bool:
    """Compare relative to the largest logit; infinities must be equal, and some logit finite."""
    for one, other in zip(ours, theirs, strict=True):
        is_same = one == other  # infinite on both sides: a token that is masked out
        is_finite = mx.isfinite(other)
        if not mx.all(mx.where(is_finite, mx.isfinite(one), is_same)).item():
            return False
        off = mx.where(is_finite, mx.abs(one - other), 0).max().item()
        largest = mx.where(is_finite, mx.abs(other), 0).max().item()
        if not off <= tolerance * largest or not mx.any(is_finite).item():
            return False
    return True
