"""Choose the size of prefill chunks by position, memory and measured speed."""

import sys
from bisect import bisect_right

from fabric.limits import BLOCK_TOKENS
from node.limits import (
    PREFILL_CHUNK_BUSY_S,
    PREFILL_CHUNK_S,
    PREFILL_CHUNK_TOKENS_BUSY_MIN,
    PREFILL_CHUNK_TOKENS_MAX,
    PREFILL_CHUNK_TOKENS_MIN,
)

# Attention cost per token grows with position: smaller chunks keep a step's time bounded.
_STEPS = ((4_096, 4_096), (16_384, 2_048), (65_536, 1_024))

_OLD_WEIGHT = 0.8  # weight of a speed's earlier measurements


class Speed:
    """Exponentially weighted units per second; 0 until something was measured."""

    def __init__(self) -> None:
        self.per_s = 0.0

    def start(self, count: int, seconds: float) -> None:
        """Begin with one measurement in place of all earlier ones."""
        self.per_s = 0.0
        self.add(count, seconds)

    def add(self, count: int, seconds: float) -> None:
        if seconds <= 0:
            return
        rate = count / seconds
        self.per_s = _OLD_WEIGHT * self.per_s + (1 - _OLD_WEIGHT) * rate if self.per_s else rate


def prefill_chunk_tokens(
    position: int,
    remaining: int,
    *,
    largest: int,
    busy: bool,
    exact: bool,
    tokens_per_s: float = 0.0,
    pairs_max: int = sys.maxsize,
    stops: tuple[int, ...] = (),
) -> int:
    """Choose the next chunk for a prompt at `position` with `remaining` tokens to go.

    `largest`: what the backend computes best. `busy`: other sequences are decoding and wait
    for this chunk. `exact`: stay on the fixed grid of 256-token chunks, so that a warm prompt
    meets the very shapes of a cold one. `tokens_per_s`: measured speed, 0 where unknown.
    `pairs_max`: query tokens times key tokens, whose scores memory must hold.
    `stops`: ascending positions that no chunk may cross; they split the fixed grid, too.
    """
    assert remaining > 0, "nothing left to prefill"
    later = bisect_right(stops, position)
    if later < len(stops):
        remaining = min(remaining, stops[later] - position)
    if exact:
        return min(remaining, BLOCK_TOKENS - position % BLOCK_TOKENS)
    by_memory = _by_memory(position, pairs_max)
    size = min(_by_position(position), _by_time(tokens_per_s, busy=busy), by_memory)
    return min(remaining, size, largest)


def _by_position(position: int) -> int:
    return next((chunk for below, chunk in _STEPS if position < below), PREFILL_CHUNK_TOKENS_MIN)


def _by_memory(position: int, pairs_max: int) -> int:
    """Return the largest power of two whose scores fit, above a least useful size."""
    size = PREFILL_CHUNK_TOKENS_MAX
    while size > PREFILL_CHUNK_TOKENS_BUSY_MIN and size * (position + size) > pairs_max:
        size //= 2
    return size


def _by_time(tokens_per_s: float, *, busy: bool) -> int:
    """Bound the time that others wait; a power of two, so that shapes seldom change."""
    if tokens_per_s <= 0:
        return PREFILL_CHUNK_TOKENS_MIN
    limit_s = PREFILL_CHUNK_BUSY_S if busy else PREFILL_CHUNK_S
    least = PREFILL_CHUNK_TOKENS_BUSY_MIN if busy else PREFILL_CHUNK_TOKENS_MIN
    tokens = min(tokens_per_s * limit_s, PREFILL_CHUNK_TOKENS_MAX)
    return max(least, 1 << max(0, int(tokens).bit_length() - 1))
