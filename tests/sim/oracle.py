"""What a single node that nothing ever happens to would answer, and what it would remember."""

from dataclasses import dataclass
from functools import lru_cache

from fabric.generation import FinishReason
from tests.sim.model import END, SimCache, next_token
from tests.sim.tokenizer import render


@dataclass(frozen=True)
class Expected:
    """One answer: what the client reads, why it ends, how many tokens it took."""

    text: str
    reason: FinishReason
    tokens_count: int


@lru_cache(maxsize=4_096)
def _cache_of(ids):
    """Compute the cache of some tokens from scratch, in steps that are shared."""
    cache = SimCache(len(ids))
    start = 0
    if len(ids) > 256:
        start = (len(ids) - 1) // 256 * 256
        before = _cache_of(ids[:start])
        cache._entries[: len(before.held)] = before.held
        cache.tokens_count = start
    for token in ids[start:]:
        cache.append(token)
    return cache


def entries(ids) -> bytes:
    """Return the cache that these tokens make."""
    return _cache_of(tuple(ids)).held.tobytes()


def answer(messages, sampling) -> Expected:
    """Answer a conversation from scratch."""
    ids = tuple(ord(char) for char in render(messages))
    warm = _cache_of(ids)
    cache = SimCache(len(ids) + sampling.max_tokens)
    cache._entries[: len(warm.held)] = warm.held
    cache.tokens_count = len(ids)
    text = ""
    for index in range(sampling.max_tokens):
        token = next_token(cache.held, sampling, sampling.seed or 0, index)
        if token == END:
            return Expected(text, FinishReason.STOP, index + 1)
        text += chr(token)
        cache.append(token)
    return Expected(text, FinishReason.LENGTH, sampling.max_tokens)
