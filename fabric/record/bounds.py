"""Bounds of a record's numbers that no other part of it limits."""

from collections.abc import Sequence
from typing import Final

from fabric.limits import EPOCH_ERASED_MAX, TEXT_SLACK_BYTES, TOKEN_TEXT_BYTES_MAX, WALL_S_MAX

_HASHES_END: Final = 1 << 64
_STEP_TOKENS: Final = 64  # checked together, as nearly all are far below the bound


def is_wall_time(seconds: float) -> bool:
    """Return whether a wall-clock time is possible; NaN and infinities are not."""
    return 0 <= seconds <= WALL_S_MAX


def is_count(number: int) -> bool:
    """Return whether an epoch or revision is low enough to be erased."""
    return 0 <= number <= EPOCH_ERASED_MAX


def is_hash(number: int) -> bool:
    """Return whether a number has 64 bits at most."""
    return 0 <= number < _HASHES_END


def text_bytes_max(tokens_count: int) -> int:
    """Return the maximum length of the text of `tokens_count` tokens."""
    return TEXT_SLACK_BYTES + tokens_count * TOKEN_TEXT_BYTES_MAX


def has_too_long_tokens(ends: Sequence[int], start: int) -> bool:
    """Return whether a prompt is too long in text up to any of its tokens from `start` on.

    A turn may end anywhere in its prompt, and a record must be able to hold what is left.
    """
    for first in range(start, len(ends), _STEP_TOKENS):
        some = ends[first : first + _STEP_TOKENS]
        if some[-1] > text_bytes_max(first + 1) and any(
            end > text_bytes_max(count) for count, end in enumerate(some, first + 1)
        ):
            return True
    return False
