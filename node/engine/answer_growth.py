"""Grow the memory that is reserved for an answer, or choose an answer to preempt for it.

More is requested a little ahead, so that idle caches can be dropped in time. If no memory is left,
one of the answers gives its own back: it is saved, and the router requests it again as an answer to
be resumed, which waits for its memory like any other.
"""

from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto
from typing import Final

from fabric.limits import BLOCK_TOKENS
from node.engine.memory_budget import MemoryBudget, Reservation
from node.engine.sequence import Sequence

ASK_AHEAD_TOKENS: Final = 32
STEPS_MAX: Final = 2  # of one iteration; each adds a token


class Growth(Enum):
    """What to do with a decoding sequence before its next step."""

    GOES_ON = auto()
    WAITS = auto()
    ENDS = auto()


def grow(sequence: Sequence, held: Reservation, budget: MemoryBudget) -> Growth:
    """Reserve memory for another block if the answer nears the end of its own."""
    left = sequence.room_tokens - sequence.cache.tokens_count
    grown_bytes = sequence.input.grown_bytes
    if left >= ASK_AHEAD_TOKENS or grown_bytes is None or not _needs_more(sequence, left):
        return Growth.GOES_ON
    room_tokens = sequence.room_tokens + BLOCK_TOKENS
    size_bytes = grown_bytes(room_tokens)
    is_last = left < STEPS_MAX
    if size_bytes > budget.total_bytes:
        return Growth.ENDS if is_last else Growth.GOES_ON
    has_grown = held.grow(size_bytes)
    if has_grown or is_last:
        sequence.room_tokens, sequence.reserve_bytes = room_tokens, size_bytes
    return Growth.GOES_ON if has_grown or not is_last else Growth.WAITS


def _needs_more(sequence: Sequence, left: int) -> bool:
    return sequence.input.sampling.max_tokens - len(sequence.answer_ids) >= left


def victim(sequences: Iterable[Sequence]) -> Sequence | None:
    """Choose the answer to preempt: background first, then the newest of the tenant with the most.

    So the oldest answer is never chosen, and finishes.
    """
    found = [s for s in sequences if s.can_yield and s.input.is_preemptible()]
    counts = Counter(sequence.tenant for sequence in found)
    return max(found, key=lambda s: (not s.is_urgent, counts[s.tenant], s.order), default=None)
