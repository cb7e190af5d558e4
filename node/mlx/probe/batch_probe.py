"""Trial of batching: find the first layout in which each sequence decodes as it does alone.

The trial runs twice: after short prompts, and after caches filled with random numbers that reach
past every window and every index's budget, where masks begin to matter. Filling a cache is free;
computing so long a prompt would take a large model seconds.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from fabric.kvcache.cache_spec import LayerKind
from node.mlx.batch_layers import WASTE_MAX
from node.mlx.engine import Batching, Engine
from node.mlx.model_spec import flatten
from node.mlx.resident_cache import ResidentCache

STEPS = 2  # decoded after a prompt


def prompt_of(tokens_count: int, seed: int = 0) -> list[int]:
    """Return a prompt of small ids, which every model has."""
    return [1 + (7 * at + tokens_count + seed) % 31 for at in range(tokens_count)]


def prefilled(engine: Engine, prompt: list[int]) -> ResidentCache:
    """Return a cache of a prompt without its last tokens."""
    cache = engine.new_cache(len(prompt))
    engine.prefill(cache, prompt[:-STEPS])
    return cache


def decode_together(
    engine: Engine, caches: list[ResidentCache], prompts: Sequence[list[int]]
) -> list[mx.array]:
    """Feed the prompts' last tokens together; return `[steps, vocabulary]` for each."""
    steps = []
    for step in range(STEPS):
        tokens = [mx.array([prompt[step - STEPS]], mx.uint32) for prompt in prompts]
        steps.append(engine.feed(caches, tokens).astype(mx.float32))
        mx.eval(steps[-1])
    return [mx.stack([rows[index] for rows in steps]) for index in range(len(prompts))]


def decode_alone(engine: Engine, prompts: Sequence[list[int]]) -> list[mx.array]:
    """Return the logits of each prompt computed by itself."""
    return [decode_together(engine, [prefilled(engine, p)], [p])[0] for p in prompts]


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


_log = logging.getLogger(__name__)
_INDEX_TOKENS = 4_096  # twice the budget of the indexes of today's models
_FAR_TOKENS_MAX = 16_384
_UNEQUAL = (300, 40)  # tokens past it, ending in different blocks of an index
_EQUAL = (300, 300)
_EQUAL_ONLY = 1.0  # no padding
_TRIALS = (
    (Batching.RAGGED, WASTE_MAX),
    (Batching.PADDED, WASTE_MAX),
    (Batching.GROUPED, WASTE_MAX),
    (Batching.PADDED, _EQUAL_ONLY),  # which needs no mask
)


def find_batching(engine: Engine, prompts: Sequence[list[int]], tolerance: float) -> None:
    """Set the engine to the first way of batching that agrees with decoding alone."""
    tokens_max, engine.padded_tokens_max = engine.padded_tokens_max, sys.maxsize
    far = _far_tokens(engine)
    for batching, waste_max in _TRIALS:
        is_equal = waste_max == _EQUAL_ONLY
        engine.batching = batching
        engine.padded_waste_max = waste_max if is_equal else inf  # else they would decode alone
        if _agrees(engine, prompts, far, tolerance, is_equal=is_equal):
            engine.padded_waste_max = waste_max
            break
    else:
        engine.batching = Batching.ALONE
    engine.padded_tokens_max = tokens_max


def _agrees(
    engine: Engine, prompts: Sequence[list[int]], far: int, tolerance: float, *, is_equal: bool
) -> bool:
    beyond = _UNEQUAL
    if is_equal:
        beyond, prompts = _EQUAL, [prompt_of(len(prompts[0]), seed) for seed in range(2)]

    def short(index: int) -> ResidentCache:
        return prefilled(engine, prompts[index])

    def long(index: int) -> ResidentCache:
        return _fill_cache(engine, far + beyond[index], index)

    try:
        for make in (short, long) if far else (short,):
            if not _agrees_behind(engine, make, prompts, tolerance):
                _log.info(
                    "%s batches compute other logits than single sequences: not used",
                    engine.batching,
                )
                return False
    except Exception as error:  # noqa: BLE001 - decoding alone avoids any error
        _log.info("%s batches do not run (%s): not used", engine.batching, type(error).__name__)
        return False
    return True


def _agrees_behind(
    engine: Engine,
    make: Callable[[int], ResidentCache],
    prompts: Sequence[list[int]],
    tolerance: float,
) -> bool:
    alone = [decode_together(engine, [make(i)], [prompt])[0] for i, prompt in enumerate(prompts)]
    together = decode_together(engine, [make(i) for i in range(len(prompts))], prompts)
    return agree(together, alone, tolerance)


def _far_tokens(engine: Engine) -> int:
    """Return the number of tokens beyond which the model attends to a part only; 0 if to all."""
    spec = engine.spec
    far = max(spec.window_tokens, widest_mask(engine.model))
    if any(layer.kind is LayerKind.INDEXED for layer in spec.layers):
        far = max(far, _INDEX_TOKENS)
    most = min(_FAR_TOKENS_MAX, engine.limits.positions_max) - max(_UNEQUAL) - 2
    return far if 0 < far <= most else 0


def widest_mask(model: Any) -> int:
    """Return the widest window that the model requests of a cache's mask; 0 for none."""
    windows = [0]

    def watched(make_mask: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **options: Any) -> Any:
            windows.append(options.get("window_size") or 0)
            return make_mask(*args, **options)

        return watching

    caches = make_prompt_cache(model)
    for leaf in flatten(caches)[0]:
        if hasattr(leaf, "make_mask"):
            leaf.make_mask = watched(leaf.make_mask)
    model(mx.array([prompt_of(3)]), cache=caches)
    return max(windows)


def _fill_cache(engine: Engine, tokens_count: int, seed: int) -> ResidentCache:
    """Return a cache of `tokens_count` random tokens."""
    cache = engine.new_cache(tokens_count + 2)
    cache.place_windows(tokens_count)
    cache.fill(tokens_count, mx.random.key(seed))
    cache.assume(tokens_count)
    return cache
