"""What becomes of an answer that outgrows the memory that was reserved for it.

Room is asked for a little ahead, so that idle caches can be dropped in time. Where there is none,
one of the answers gives its memory back: it is saved, handed over to nobody else, and comes again
as an answer to be resumed, which waits for its memory like any other.
"""

from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto
from typing import Final

from fabric.limits import BLOCK_TOKENS
from node.engine.memory_budget import MemoryBudget, Reservation
from node.engine.sequence import Sequence

ASK_AHEAD_TOKENS: Final = 32
STEPS_MAX: Final = 2  # of one iteration, each of which takes a token's room


class Growth(Enum):
    """What to do with a decoding sequence before its next step."""

    GOES_ON = auto()
    WAITS = auto()
    ENDS = auto()


def grow(sequence: Sequence, held: Reservation, budget: MemoryBudget) -> Growth:
    """Reserve another block's room where the answer comes near the end of what it has."""
    left = sequence.room_tokens - sequence.cache.tokens_count
    if left >= ASK_AHEAD_TOKENS or sequence.grown_bytes is None or not _needs_more(sequence, left):
        return Growth.GOES_ON
    room_tokens = sequence.room_tokens + BLOCK_TOKENS
    size_bytes = sequence.grown_bytes(room_tokens)
    is_last = left < STEPS_MAX
    if size_bytes > budget.total_bytes:
        return Growth.ENDS if is_last else Growth.GOES_ON
    has_grown = held.grow(size_bytes)
    if has_grown or is_last:
        sequence.room_tokens, sequence.reserve_bytes = room_tokens, size_bytes
    return Growth.GOES_ON if has_grown or not is_last else Growth.WAITS


def _needs_more(sequence: Sequence, left: int) -> bool:
    return sequence.sampling.max_tokens - len(sequence.answer_ids) >= left


def victim(sequences: Iterable[Sequence]) -> Sequence | None:
    """Choose who gives memory back: background, then of the tenant with most, who came last.

    So whoever came first is never chosen, and comes to its end.
    """
    found = [s for s in sequences if s.can_yield and s.is_preemptible()]
    counts = Counter(sequence.tenant for sequence in found)
    return max(found, key=lambda s: (not s.is_urgent, counts[s.tenant], s.order), default=None)
