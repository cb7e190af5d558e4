"""The answers and records of a single undisturbed node."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fabric.turn.generation import FinishReason
from tests.sim.model import END, ENTRY_BYTES, FULL, SimCache
from tests.sim.tokenizer import render
from tests.sim.window import WINDOW_ENTRY_BYTES


@dataclass(frozen=True)
class Expected:
    """One answer: what the client reads, why it ends, how many tokens it took."""

    text: str
    reason: FinishReason
    tokens_count: int


@lru_cache(maxsize=4_096)
def _cache_of(ids, kind):
    """Compute the cache of some tokens from scratch, in steps that are shared."""
    cache = SimCache(len(ids), kind)
    start = 0
    if len(ids) > 256:
        start = (len(ids) - 1) // 256 * 256
        cache = _cache_of(ids[:start], kind).copy(len(ids))
    for token in ids[start:]:
        cache.append(token)
    return cache


def is_cache_of(cache, ids) -> bool:
    """Return whether a cache holds exactly what these tokens compute."""
    held, base, window, state = cache.parts()
    expected = _cache_of(tuple(ids), cache.kind).parts()
    start = base * WINDOW_ENTRY_BYTES
    return (held, window, state) == (expected[0], expected[2][start:], expected[3])


def are_alike(one, other) -> bool:
    """Return whether two caches hold the same; either may have more window rows in front."""
    held, base, window, *rest = one.parts()
    others_held, others_base, others_window, *others_rest = other.parts()
    common = max(base, others_base)
    rows = window[(common - base) * WINDOW_ENTRY_BYTES :]
    others_rows = others_window[(common - others_base) * WINDOW_ENTRY_BYTES :]
    return (one.shifts, held, rows, rest) == (other.shifts, others_held, others_rows, others_rest)


def exact_tokens(cache, ids) -> int:
    """Count the leading tokens of a cache that match what these tokens compute."""
    held = cache.held
    expected = _cache_of(tuple(ids), cache.kind).held[: len(held)]
    if held.tobytes() == expected.tobytes():
        return cache.tokens_count
    return int(np.argmax(held[: len(expected)] != expected)) // ENTRY_BYTES


def entries_of(ids, kind):
    """List the entries that these tokens compute."""
    held = _cache_of(tuple(ids), kind).held.tobytes()
    return [held[at : at + ENTRY_BYTES] for at in range(0, len(held), ENTRY_BYTES)]


def answer(messages, sampling, kind=FULL) -> Expected:
    """Answer a conversation from scratch."""
    return answer_to(tuple(ord(char) for char in render(messages)), sampling, kind)


def answer_to(ids, sampling, kind=FULL, first=0) -> Expected:
    """Answer a prompt that ends with the `first` tokens of its answer, from scratch."""
    return answer_from(_cache_of(ids, kind), sampling, first)


def answer_from(cache, sampling, first=0) -> Expected:
    """Answer with a cache that holds a whole prompt, and the `first` tokens of its answer."""
    cache = cache.copy(cache.tokens_count + sampling.max_tokens)
    text = ""
    for index in range(first, sampling.max_tokens):
        token = cache.next_token(sampling, sampling.seed or 0, index)
        if token == END:
            return Expected(text, FinishReason.STOP, index + 1)
        text += chr(token)
        cache.append(token)
    return Expected(text, FinishReason.LENGTH, sampling.max_tokens)
