"""Cost terms of turns and moves, in seconds. Pure.

All comparisons of nodes use these terms: a cost in blocks or hits would send work to slow nodes.
"""

from fabric.assumed_speeds import DISK_BYTES_PER_S

SHIP_START_S = 0.03
BATCH_EXPONENT = 0.5  # one sequence's decode speed falls with the root of the batch size
TOKENS_PER_S_MIN = 1.0
STICKINESS_S = 0.15
STICKINESS_SHARE = 0.1


def prefill_s(tokens: float, tokens_per_s: float) -> float:
    """Estimate the time to prefill `tokens`; negative counts take no time."""
    return max(0.0, tokens) / max(tokens_per_s, TOKENS_PER_S_MIN)


def decode_s(tokens: int, tokens_per_s: float, active: int) -> float:
    """Estimate the time to decode an answer beside `active` others."""
    slowdown: float = (active + 1) ** BATCH_EXPONENT
    return tokens * slowdown / max(tokens_per_s, TOKENS_PER_S_MIN)


def load_s(stored_bytes: float) -> float:
    """Estimate the time to load a cache from disk into memory."""
    return stored_bytes / DISK_BYTES_PER_S


def ship_s(missing_bytes: int, bytes_per_s: float) -> float:
    """Estimate the time to transfer bytes between nodes, at a rate of `link_rates`."""
    return SHIP_START_S if missing_bytes <= 0 else SHIP_START_S + missing_bytes / bytes_per_s


def near_s(best_s: float) -> float:
    """Return the cost up to which estimates count as equal to the best, being this rough."""
    return best_s + max(STICKINESS_S, STICKINESS_SHARE * best_s)
