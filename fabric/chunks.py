"""How many prompt tokens to compute in one go."""

from fabric.limits import BLOCK_TOKENS, PREFILL_CHUNK_TOKENS_MAX, PREFILL_CHUNK_TOKENS_MIN

# Attention cost per token grows with position: smaller chunks keep a step's time bounded.
_STEPS = ((4_096, 4_096), (16_384, 2_048), (65_536, 1_024))


def prefill_chunk_tokens(
    position: int, remaining: int, *, largest: int, busy: bool, exact: bool
) -> int:
    """Choose the next chunk for a prompt at `position` with `remaining` tokens to go.

    `largest`: what the backend computes best. `busy`: other sequences are decoding and wait
    for this chunk. `exact`: stay on the fixed grid of 256-token chunks, so that a warm prompt
    meets the very shapes of a cold one.
    """
    assert remaining > 0, "nothing left to prefill"
    if exact:
        return min(remaining, BLOCK_TOKENS - position % BLOCK_TOKENS)
    size = PREFILL_CHUNK_TOKENS_MIN
    if not busy:
        size = next((chunk for below, chunk in _STEPS if position < below), size)
    assert PREFILL_CHUNK_TOKENS_MIN <= size <= PREFILL_CHUNK_TOKENS_MAX, "chunk out of range"
    return min(remaining, size, largest)
