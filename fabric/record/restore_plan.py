"""At which token may a context be taken up again, given what is stored of it?

full layers        need every block from the first token on
window layers      need the blocks that the next token's window touches, wherever it is
recurrent layers   need a state of exactly that token
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Stored:
    """Stored blocks and states, by position in the context."""

    full_end: int  # tokens 0:full_end
    window_ends: Mapping[int, int]  # block start: its end
    state_ends: AbstractSet[int]


def window_blocks(tokens_count: int, window_tokens: int) -> range:
    """List the starts of the blocks that the token at `tokens_count` sees through a window."""
    first = max(0, tokens_count - window_tokens + 1)
    return range(first // BLOCK_TOKENS * BLOCK_TOKENS, tokens_count, BLOCK_TOKENS)


def restore_point(limit: int, stored: Stored, *, window_tokens: int, has_states: bool) -> int:
    """Return the largest token count up to `limit` that can be restored; 0 for none."""
    most = min(limit, stored.full_end)
    if has_states:
        candidates = sorted((end for end in stored.state_ends if 0 < end <= most), reverse=True)
    elif window_tokens:
        candidates = [most, *range((most - 1) // BLOCK_TOKENS * BLOCK_TOKENS, 0, -BLOCK_TOKENS)]
    else:
        return most
    for count in candidates:
        if not window_tokens or _has_windows(count, stored.window_ends, window_tokens):
            return count
    return 0


def _has_windows(count: int, ends: Mapping[int, int], window_tokens: int) -> bool:
    return all(
        ends.get(start, 0) >= min(count, start + BLOCK_TOKENS)
        for start in window_blocks(count, window_tokens)
    )


def essential(record: Manifest, window_tokens: int) -> Manifest:
    """Leave out what is not needed to go on from the record's end: that stays where it is."""
    first = max(0, record.tokens_count - window_tokens + 1)
    return replace(
        record,
        windows=tuple(place for place in record.windows if place.end > first),
        states=record.states[-1:],
    )
